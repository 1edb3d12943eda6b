"""`/lanes`: who carries each lane, and which of them wait because an operator wants it."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Once
from relay.console.api.parameters import MaybeReasoned, Reasoned
from relay.console.given import Lane, Operations, Operator, Viewer, within
from relay.operate.pauses import LaneStatus

router = APIRouter(prefix="/lanes", tags=["lanes"])


@router.get("")
def list_(operations: Operations, _: Viewer) -> list[LaneStatus]:
    """List the lanes, by number."""
    return operations.list_lanes()


@router.post("/{lane}/pause", response_model=LaneStatus)
def pause(request: Request, once: Once, who: Operator, *, lane: Lane, asked: Reasoned) -> Response:
    """Let no relay carry a lane; its rows stay pending, in order."""
    return once.in_transaction(
        who.name,
        LaneStatus,
        lambda connection: within(request, connection).pause_lane(lane, by=who.name, why=asked.why),
    )


@router.post("/{lane}/resume", response_model=LaneStatus)
def resume(request: Request, once: Once, who: Operator, *, lane: Lane, asked: MaybeReasoned) -> Response:
    """Let the relays carry a paused lane again."""
    return once.in_transaction(
        who.name,
        LaneStatus,
        lambda connection: within(request, connection).resume_lane(lane, by=who.name, why=asked.reason),
    )
