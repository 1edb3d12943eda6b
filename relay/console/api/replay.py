"""`/replay`: what a replay would send again, and its order; `/jobs` has those that were ordered."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Once
from relay.console.api.parameters import ReplayFilter, Staged
from relay.console.given import Operations, Operator, Viewer, within
from relay.console.site import site_of
from relay.errors import UsageError
from relay.jobs.job import Job
from relay.operate.asked import MaybeReasoned, ShortString, check_choice
from relay.operate.sent.selection import Filter
from relay.operate.sent.target import Target, Trace
from relay.operations.results import ReplayPreview

router = APIRouter(prefix="/replay", tags=["replay"])


class Order(ReplayFilter, MaybeReasoned, Staged):
    """Which sent rows go out again, where to, and how carefully."""

    all: Annotated[bool, Field(description="Every sent row; needed when there is no filter.")] = False
    to_exchange: Annotated[
        ShortString | None, Field(description='In place of where they went; "" addresses a queue.')
    ] = None
    routing_key: Annotated[ShortString | None, Field(description="In place of theirs; needs to_exchange.")] = None
    trace: Annotated[Trace, Field(description="keep `traceparent`, move it into `x-link-traceparent`, or drop it.")] = (
        Trace.LINK
    )


@router.get("/preview")
def preview(operations: Operations, _: Viewer, asked: Annotated[ReplayFilter, Query()]) -> ReplayPreview:
    """Count exactly what a replay would send, by day."""
    return operations.preview_replay(asked.filter())


@router.post("", status_code=HTTPStatus.ACCEPTED, response_model=Job)
def order(request: Request, once: Once, who: Operator, asked: Order) -> Response:
    """Send rows again that were sent before now, in order per key; a console does it."""
    if asked.routing_key is not None and asked.to_exchange is None:
        raise UsageError("routing_key needs to_exchange: rows of one filter may go to several exchanges")
    chosen, caution = asked.filter(), asked.caution()
    check_choice(is_filtered=chosen != Filter(), is_all=asked.all)
    answer = once.in_transaction(
        who.name,
        Job,
        lambda connection: within(request, connection).order_replay(
            chosen,
            Target(asked.to_exchange, asked.routing_key, asked.trace),
            by=who.name,
            why=asked.reason,
            caution=caution,
        ),
        status=HTTPStatus.ACCEPTED,
    )
    site_of(request).runner.wake()
    return answer
