"""`/lanes`: who carries each lane, and which of them wait because an operator wants it."""

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Once
from relay.console.api.parameters import Closed, Text, Why
from relay.console.given import Operations, Operator, Viewer, within
from relay.engine.session.session import LANES
from relay.operate.pauses import LaneStatus

router = APIRouter(prefix="/lanes", tags=["lanes"])

Lane = Annotated[int, Path(ge=0, lt=LANES)]


class Pause(Closed):
    """Why a lane is paused."""

    why: Why


class Resume(Closed):
    """Why a lane goes on."""

    why: Text = ""


@router.get("")
def list_(operations: Operations, _: Viewer) -> list[LaneStatus]:
    """List the lanes, by number."""
    return operations.list_lanes()


@router.post("/{lane}/pause", response_model=LaneStatus)
def pause(request: Request, once: Once, who: Operator, *, lane: Lane, asked: Pause) -> Response:
    """Let no relay carry a lane; its rows stay pending, in order."""
    return once.in_transaction(
        who.name,
        LaneStatus,
        lambda connection: within(request, connection).pause_lane(lane, by=who.name, why=asked.why),
    )


@router.post("/{lane}/resume", response_model=LaneStatus)
def resume(request: Request, once: Once, who: Operator, *, lane: Lane, asked: Resume) -> Response:
    """Let the relays carry a paused lane again."""
    return once.in_transaction(
        who.name,
        LaneStatus,
        lambda connection: within(request, connection).resume_lane(lane, by=who.name, why=asked.why.strip() or None),
    )
