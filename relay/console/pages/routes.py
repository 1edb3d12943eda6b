"""`/routes`: where messages go, what waits for a route, and what an operator has paused."""

from contextlib import suppress
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Form
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.forms import InputError
from relay.console.given import FormWords, Here, Once, Operator, Owner, Viewer
from relay.console.templates import page
from relay.engine.session.session import LANES
from relay.errors import NotFoundError
from relay.operate import lanes
from relay.operate.asked import Id, Lane, Nothing, ShortString
from relay.operate.operation import Role
from relay.operate.routes import asked as quarantine

router = APIRouter()

Name = Annotated[ShortString, Form()]


@router.get("/routes")
async def routes(request: Request, site: Here, who: Viewer) -> HTMLResponse:
    """Show the map, the routes in quarantine and the paused lanes."""
    found = await run_in_threadpool(site.do, quarantine.list_, quarantine.ListRoutes(), who)
    carried = await run_in_threadpool(site.do, lanes.list_, Nothing(), who)
    return page(
        request,
        "routes.html",
        map=await site.route_map.answer(),
        routes=found,
        lanes=[lane for lane in carried if lane.paused_at is not None],
        numbers=range(LANES),
        may_change=who.role.includes(Role.OPERATOR),
        may_discard=who.role.includes(Role.OWNER),
    )


@router.post("/routes/pause")
def pause_route(
    site: Here, who: Operator, once: Once, *, routing_key: Name, exchange: Name = "", why: FormWords = ""
) -> Response:
    """Pause an address, whether it works or not."""
    asked = quarantine.PauseRoute(exchange=exchange, routing_key=routing_key, why=_reason(why))
    site.change(quarantine.pause, asked, who, once)
    return _back()


@router.post("/routes/{route}/resume")
def resume_route(site: Here, who: Operator, once: Once, *, route: Id, why: FormWords = "") -> Response:
    """Let the relays try a paused route."""
    site.change(quarantine.resume, quarantine.ResumeRoute(route=route, why=why), who, once)
    return _back()


@router.post("/routes/{route}/probe")
def probe(site: Here, who: Operator, route: Id) -> Response:
    """Let the relays try a route now."""
    with suppress(NotFoundError):  # it works by now
        site.do(quarantine.probe, quarantine.Probe(routes=(route,)), who)
    return _back()


@router.post("/routes/{route}/discard")
def discard(site: Here, who: Owner, once: Once, *, route: Id, why: FormWords = "") -> Response:
    """Order a job that gives up all rows of a route; the console runs it."""
    if not why:
        raise InputError("why", "say why: the audit keeps it with each row that you discard")
    return site.order(quarantine.discard, quarantine.ChangeRoute(route=route, why=why), who, once)


@router.post("/routes/lanes/pause")
def pause_lane(
    site: Here, who: Operator, once: Once, *, lane: Annotated[Lane, Form()], why: FormWords = ""
) -> Response:
    """Pause a lane."""
    site.change(lanes.pause, lanes.PauseLane(lane=lane, why=_reason(why)), who, once)
    return _back()


@router.post("/routes/lanes/{lane}/resume")
def resume_lane(site: Here, who: Operator, once: Once, *, lane: Lane, why: FormWords = "") -> Response:
    """Let the relays carry a paused lane."""
    site.change(lanes.resume, lanes.ResumeLane(lane=lane, why=why), who, once)
    return _back()


def _back() -> Response:
    return RedirectResponse("/routes", HTTPStatus.SEE_OTHER)


def _reason(why: str) -> str:
    if not why:
        raise InputError("why", "say why: the audit keeps it, and others see it while the pause lasts")
    return why
