"""`/routes`: where messages go, what waits for a route, and what an operator has paused."""

from contextlib import suppress
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Form
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.given import FormWords, Operations, Operator, Owner, Viewer
from relay.console.site import site_of
from relay.console.templates import page
from relay.engine.session.session import LANES
from relay.errors import NotFoundError, UsageError
from relay.operate import lanes
from relay.operate.asked import Id, Lane, Nothing, ShortString
from relay.operate.operation import Role

router = APIRouter()

Name = Annotated[ShortString, Form()]


@router.get("/routes")
async def routes(request: Request, operations: Operations, who: Viewer) -> HTMLResponse:
    """Show the map, the routes in quarantine and the paused lanes."""
    found = await run_in_threadpool(operations.list_routes)
    carried = await run_in_threadpool(operations.do, lanes.list_, Nothing())
    return page(
        request,
        "routes.html",
        map=await site_of(request).route_map.answer(),
        routes=found,
        lanes=[lane for lane in carried if lane.paused_at is not None],
        numbers=range(LANES),
        may_change=who.role.includes(Role.OPERATOR),
        may_discard=who.role.includes(Role.OWNER),
    )


@router.post("/routes/pause")
def pause_route(
    operations: Operations, who: Operator, *, routing_key: Name, exchange: Name = "", why: FormWords = ""
) -> Response:
    """Pause an address, whether it works or not."""
    operations.pause_route(exchange, routing_key, by=who.name, why=_reason(why))
    return _back()


@router.post("/routes/{route}/resume")
def resume_route(operations: Operations, who: Operator, *, route: Id, why: FormWords = "") -> Response:
    """Let the relays try a paused route."""
    operations.resume_route(route, by=who.name, why=why or None)
    return _back()


@router.post("/routes/{route}/probe")
def probe(operations: Operations, _: Operator, route: Id) -> Response:
    """Let the relays try a route now."""
    with suppress(NotFoundError):  # it works by now
        operations.probe([route])
    return _back()


@router.post("/routes/{route}/discard")
def discard(request: Request, operations: Operations, who: Owner, *, route: Id, why: FormWords = "") -> Response:
    """Order a job that gives up all rows of a route; the console runs it."""
    if not why:
        raise UsageError("say why: the audit keeps it with each row that you discard")
    job = operations.order_discard(route, [], by=who.name, why=why).job
    site_of(request).runner.wake()
    return RedirectResponse(f"/jobs/{job.id}", HTTPStatus.SEE_OTHER)


@router.post("/routes/lanes/pause")
def pause_lane(
    operations: Operations, who: Operator, *, lane: Annotated[Lane, Form()], why: FormWords = ""
) -> Response:
    """Pause a lane."""
    operations.do(lanes.pause, lanes.PauseLane(lane=lane, why=_reason(why)), by=who.name)
    return _back()


@router.post("/routes/lanes/{lane}/resume")
def resume_lane(operations: Operations, who: Operator, *, lane: Lane, why: FormWords = "") -> Response:
    """Let the relays carry a paused lane."""
    operations.do(lanes.resume, lanes.ResumeLane(lane=lane, why=why), by=who.name)
    return _back()


def _back() -> Response:
    return RedirectResponse("/routes", HTTPStatus.SEE_OTHER)


def _reason(why: str) -> str:
    if not why:
        raise UsageError("say why: the audit keeps it, and others see it while the pause lasts")
    return why
