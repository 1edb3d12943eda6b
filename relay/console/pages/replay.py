"""`/replay`: count what was sent, by day, and send it again."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Query
from pydantic import BaseModel, ConfigDict, field_validator
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from relay.console.forms import InputError, Returned
from relay.console.given import Here, Once, Operator, Viewer
from relay.console.templates import page
from relay.errors import UsageError
from relay.jobs.job import BELOW_RATE, LEAST_RATE, Caution
from relay.operate import replay
from relay.operate.asked import Words
from relay.operate.operation import Role
from relay.operate.replay import OrderReplay, SentRows
from relay.operate.sent.moment import parse_moment
from relay.operate.sent.target import Trace

router = APIRouter()

STAGES = (1, 10, 100)
MOST_FAILING = 0.05
LONGEST = 5000  # characters: a hundred message ids


class Wanted(BaseModel):
    """The filters of the form; what is empty selects nothing away."""

    model_config = ConfigDict(extra="ignore")

    type: str = ""
    key: str = ""
    event: str = ""
    since: str = ""
    until: str = ""
    id: str = ""  # message ids, apart by blanks or commas

    @field_validator("type", "key", "event", "since", "until", "id")
    @classmethod
    def _storable(cls, text: str) -> str:
        if "\0" in text or len(text) > LONGEST:
            raise ValueError("no text that a message can have")
        return text.strip()

    @property
    def is_empty(self) -> bool:
        return self == Wanted()

    def check_moments(self) -> None:
        """See that the moments can be read; InputError for the first that cannot."""
        for name, text in (("since", self.since), ("until", self.until)):
            if text:
                try:
                    parse_moment(text, "this field", datetime.now(UTC))
                except UsageError as error:
                    raise InputError(name, str(error)) from None

    def returned(self, error: UsageError) -> Returned:
        """Return the form as it was sent, with what is wrong."""
        values = {name: [text] for name, text in self.model_dump(mode="json").items()}
        wrong = {error.name: str(error)} if isinstance(error, InputError) else {}
        return Returned("", "filters", values, wrong, "" if wrong else str(error))

    def asked(self) -> SentRows:
        """Return which messages to send again; UsageError for what is no message id."""
        named = self.id.replace(",", " ").split() or [self.id]
        return SentRows.model_construct(
            message_ids=tuple(_message_id(each) for each in named) if self.id else (),
            aggregate_type=self.type or None,
            aggregate_id=self.key or None,
            event_type=self.event or None,
            since=self.since or None,
            until=self.until or None,
        )


class ReplayOrder(Wanted):
    """Which messages to send again, and how carefully."""

    why: Words = ""
    staged: bool = False
    rate: str = ""
    trace: Trace = Trace.LINK

    def caution(self) -> Caution:
        """Return what the form says; UsageError for what is no rate."""
        try:
            rate = float(self.rate) if self.rate else None
        except ValueError:
            rate = 0
        if rate is not None and not LEAST_RATE <= rate < BELOW_RATE:
            raise InputError("rate", f"the rate is a number of messages a second, at least {LEAST_RATE}, such as 500")
        stages = STAGES if self.staged else ()
        return Caution(rate=rate, stages=stages, stop_when_failing=MOST_FAILING if stages else None)


def _message_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InputError("id", f"{text[:80]!r} is no message id") from None


@router.get("/replay")
def show(request: Request, site: Here, who: Viewer, wanted: Annotated[Wanted, Query()]) -> HTMLResponse:
    """Show the form; with a filter also what would go out, by day."""
    returned, found = None, None
    if not wanted.is_empty:
        try:
            wanted.check_moments()
            found = site.do(replay.preview, wanted.asked(), who)
        except UsageError as error:
            returned = wanted.returned(error)
    return page(
        request,
        "replay.html",
        code=422 if returned else 200,
        returned=returned,
        wanted=wanted,
        found=found,
        can_order=who.role.includes(Role.OPERATOR),
    )


@router.post("/replay")
def order(site: Here, who: Operator, once: Once, asked: Annotated[ReplayOrder, Form()]) -> Response:
    """Order a replay; the console sends it."""
    chosen = asked.asked()
    if chosen.is_everything:
        raise UsageError("choose what goes out again, by one filter at least")
    wanted = OrderReplay.model_construct(**dict(chosen), **asdict(asked.caution()), trace=asked.trace, why=asked.why)
    return site.order(replay.order, wanted, who, once)
