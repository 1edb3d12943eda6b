"""`/messages`: look for messages; one message with its timeline; what it says, once it is revealed."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Form, Query
from pydantic import BaseModel, ConfigDict, field_validator
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.access.identity import Identity
from relay.console.given import FormWords, Operator, Sessions, Viewer
from relay.console.site import site_of
from relay.console.templates import page
from relay.errors import OutboxError, UsageError
from relay.operate.asked import Id
from relay.operate.messages.look import MessageState, Place, Search, row_id, search
from relay.operate.messages.message import Audited, FoundMessage, read_audit, read_message, read_outcome, reveal_message
from relay.operate.operation import Role
from relay.runtime.scrub import scrub

router = APIRouter()


class SearchFilters(BaseModel):
    """The filters of the form; what is empty selects nothing away."""

    model_config = ConfigDict(extra="ignore")

    state: MessageState = MessageState.SENT
    id: str = ""
    type: str = ""
    key: str = ""
    event: str = ""
    since: str = ""
    until: str = ""
    after: str = ""

    @field_validator("id", "type", "key", "event", "since", "until", "after")
    @classmethod
    def _storable(cls, text: str) -> str:
        if "\0" in text or len(text) > 1000:
            raise ValueError("no text that a message can have")
        return text.strip()

    def search(self) -> Search:
        """Return what is looked for.

        Raises:
            UsageError: an id or a time cannot be read.
        """
        return Search(
            state=self.state,
            row=row_id(self.id) if self.id else None,
            aggregate_type=self.type or None,
            aggregate_id=self.key or None,
            event_type=self.event or None,
            since=_moment(self.since),
            until=_moment(self.until),
        )

    def address(self, **changed: str) -> str:
        """Return the address of the page with these filters, and others changed."""
        given = {**self.model_dump(mode="json", exclude={"after"}), **changed}
        return "/messages?" + urlencode({name: value for name, value in given.items() if value})


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a message's way."""

    mood: str
    words: str
    at: datetime | None = None
    detail: str = ""


@router.get("/messages")
def list_messages(
    request: Request, database: Sessions, _: Viewer, filters: Annotated[SearchFilters, Query()]
) -> HTMLResponse:
    """Show a page of messages."""
    words, found = "", None
    try:
        wanted = filters.search()
        with database.session() as tables:
            found = search(tables, wanted, after=filters.after or None)
    except UsageError as error:
        words = str(error)
    return page(
        request, "messages.html", code=422 if words else 200, filters=filters, states=list(MessageState), found=found,
        words=words,
    )  # fmt: skip


@router.get("/messages/{row}")
def show_message(request: Request, database: Sessions, _: Viewer, *, row: Id, at: str = "") -> HTMLResponse:
    """Show one message with its timeline, without what it says."""
    place = _place(at)
    with database.session() as tables:
        message = read_message(tables, row, place)
        audited = read_audit(tables, message)
    return page(
        request, "message.html", message=message, at=at, steps=_steps(request, message, audited), content=None,
        headers="", can_reveal=_can_reveal(request),
    )  # fmt: skip


@router.post("/messages/{row}/reveal")
def reveal(
    request: Request,
    database: Sessions,
    who: Operator,
    *,
    row: Id,
    at: Annotated[str, Form(max_length=100)] = "",
    why: FormWords = "",
) -> HTMLResponse:
    """Show what a message says; the audit notes who has read it."""
    place = _place(at)
    with database.session() as tables:
        message = read_message(tables, row, place)
        content = reveal_message(tables, message, place=place, by=who.name, why=why or None)
        audited = read_audit(tables, message)
    headers = "" if content.headers is None else orjson.dumps(content.headers, option=orjson.OPT_INDENT_2).decode()
    return page(
        request, "message.html", message=message, at=at, steps=_steps(request, message, audited), content=content,
        headers=headers, can_reveal=True,
    )  # fmt: skip


def _steps(request: Request, message: FoundMessage, audited: Sequence[Audited]) -> list[Step]:
    """Return the way of a message: row, broker, inbox, dead letter."""
    steps = [*_of_outbox(message), *_of_consumers(request, message)]
    steps += [Step("warning", f"{each.command}, by {each.by}", each.at, each.why or "") for each in audited]
    return sorted(steps, key=lambda step: (step.at is None, step.at or message.created_at))


def _of_outbox(message: FoundMessage) -> list[Step]:
    steps = [Step("ok", f"written into lane {message.lane}", message.created_at, message.writer or "")]
    match message.state:
        case MessageState.PENDING:
            tried = f"tried {message.attempts} times; {message.last_error or ''}" if message.attempts else ""
            steps.append(Step("warning", "waits to be sent", message.available_at, tried))
        case MessageState.PARKED:
            behind = f", held behind {message.held_behind}" if message.held_behind else ""
            steps.append(Step("failed", f"parked{behind}", message.parked_at, message.last_error or ""))
        case MessageState.QUARANTINED:
            words = f"waits for route {message.quarantine}"
            steps.append(Step("failed", words, message.parked_at, message.last_error or ""))
        case MessageState.ARCHIVED | MessageState.DISCARDED if message.parked_at:  # the audit's step says by whom
            steps.append(Step("failed", "parked", message.parked_at, message.last_error or ""))
        case MessageState.ARCHIVED | MessageState.DISCARDED:
            steps.append(Step("failed", str(message.state), None, message.last_error or ""))
        case MessageState.SENT:
            steps.append(Step("ok", "confirmed by the broker, and marked as sent", message.sent_at))
    return steps


def _of_consumers(request: Request, message: FoundMessage) -> list[Step]:
    site = site_of(request)
    steps = [
        Step("failed", f"in {look.queue}, when it was looked at", look.at, group.cause)
        for look, group in site.looks.of_message(str(message.message_id))
    ]
    try:
        with site.inbox.session() as tables:
            outcome = read_outcome(tables, message)
    except OutboxError as error:
        return [*steps, Step("warning", "what consumers have done with it is not known", None, scrub(str(error)))]
    steps += [Step("ok", f"applied by {each.consumer}", each.at) for each in outcome.applied]
    steps += [
        Step("warning", f"held by {each.consumer} after {each.attempts} tries", each.since, each.reason or "")
        for each in outcome.held
    ]
    if message.state == MessageState.SENT and not steps:
        steps.append(Step("skipped", "no inbox here has it", None, "a consumer may have another database"))
    return steps


def _can_reveal(request: Request) -> bool:
    identity: Identity = request.state.identity
    return identity.role.includes(Role.OPERATOR) and not site_of(request).settings.console.read_only


def _place(text: str) -> Place | None:
    return Place.of(text) if text else None


def _moment(text: str) -> datetime | None:
    """Return a time that a browser's form or an operator has written; UTC unless it says more.

    Raises:
        UsageError: it is no time.
    """
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{text[:80]!r} is no time, as in 2026-11-26 08:30") from None
