"""`/routes`: where messages go, what waits for a route and how it is repaired, and what an operator has paused."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Form
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.access.identity import Identity
from relay.console.forms import said
from relay.console.given import Alone, FormWords, Here, Once, Operator, Owner, Viewer
from relay.console.site import Site
from relay.console.templates import page
from relay.engine.session.session import LANES
from relay.errors import NotFoundError
from relay.operate import lanes
from relay.operate.asked import MOST, GroupId, Id, Lane, Nothing, ShortString, Words
from relay.operate.cause import cause_of
from relay.operate.operation import Role
from relay.operate.routes import asked as quarantine
from relay.operate.routes import declare as topology
from relay.operate.routes.map import NOT_THERE, RouteMap, Way
from relay.operate.routes.quarantine import ReleasedRoute, RouteStatus, route_group
from relay.servers.rabbitmq.topology import BAD, Declared, Standing

router = APIRouter()

Name = Annotated[ShortString, Form()]

UNFOLDED = 10  # ways, or routes, that a page shows at once
LISTED = 200  # routes of a group; with more in all, the page does not look again by itself
SHOWN = 20  # rows of a route
RELEASED = 50  # routes
# What declaring does with what a dry run has found, in the order of the page.
WHAT_DECLARING_DOES = {
    Standing.DIFFERS: "stays as it is: it conflicts with the list",
    Standing.FAILED: "cannot be declared",
    Standing.MISSING: "is declared",
    Standing.UNSEEN: "is bound; AMQP does not show whether it is there",
    Standing.DECLARED: "was missing, and is there now",
    Standing.BOUND: "is bound now",
    Standing.THERE: "is there as listed",
}


@dataclass(frozen=True, slots=True)
class ExchangeWays:
    """The ways that begin at an exchange."""

    exchange: str
    ways: Sequence[Way]

    @property
    def ready(self) -> int:
        """Messages that wait in its queues, as far as they are known."""
        return sum({way.queue: way.ready or 0 for way in self.ways}.values())

    @property
    def missing(self) -> int:
        """Queues that are not there."""
        return len({way.queue for way in self.ways if way.words == NOT_THERE})

    @property
    def unread(self) -> int:
        """Queues without a consumer."""
        return len({way.queue for way in self.ways if way.consumers == 0})


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """Routes in quarantine of one cause and one exchange."""

    id: str  # of the failure group
    cause: str
    exchange: str
    routes: Sequence[RouteStatus]

    @property
    def rows(self) -> int:
        return sum(route.rows for route in self.routes)


@router.get("/routes")
async def routes(request: Request, site: Here, who: Viewer, q: Words = "") -> HTMLResponse:
    """Show the map, then the routes in quarantine by cause and exchange, and what is paused."""
    found = await run_in_threadpool(site.do, quarantine.list_, quarantine.ListRoutes(), who)
    gone = await run_in_threadpool(site.do, quarantine.released, quarantine.ListReleased(limit=RELEASED), who)
    carried = await run_in_threadpool(site.do, lanes.list_, Nothing(), who)
    failing = [route for route in found if route.paused_at is None]
    route_map = await site.route_map.answer()
    return page(
        request,
        "routes.html",
        map=route_map,
        exchanges=_by_exchange(route_map) if route_map else [],
        unfolded=UNFOLDED,
        listed=LISTED,
        failing=failing,
        rows=sum(route.rows for route in failing),
        tried=sum(route.last_probe != "returned" for route in failing),
        groups=_groups([route for route in failing if _has(route, q)]),
        q=q,
        paused=[route for route in found if route.paused_at is not None],
        released=gone,
        most_released=RELEASED,
        lanes=[lane for lane in carried if lane.paused_at is not None],
        numbers=range(LANES),
        may_change=who.role.includes(Role.OPERATOR),
    )


@router.get("/routes/topology")
def compare(request: Request, site: Here, who: Viewer, _: Alone, route: Id | None = None) -> HTMLResponse:
    """Show what declaring the list of relay.toml would do."""
    found = site.do(topology.compare, Nothing(), who)
    return _topology(request, who, found, route, is_done=False)


@router.post("/routes/topology")
def declare(
    request: Request, site: Here, who: Owner, _: Alone, *, why: FormWords = "", route: Annotated[Words, Form()] = ""
) -> HTMLResponse:
    """Declare what relay.toml lists, and show what was done."""
    done = site.do(topology.apply, topology.ApplyTopology(why=said(why)), who)
    return _topology(request, who, done, int(route) if route.isdecimal() else None, is_done=True)


@router.get("/routes/{route}")
def show(request: Request, site: Here, who: Viewer, route: Id) -> HTMLResponse:
    """Show why a route does not work, what came of the last probe, and the ways to repair it."""
    found, gone = None, None
    with suppress(NotFoundError):
        found = site.do(quarantine.show, quarantine.ShowRoute(name=str(route), limit=SHOWN), who)
    if found is None or found.route.id != route:  # a row may have the number
        found, gone = None, _released(site, who, route)
    return page(
        request,
        "route.html",
        found=found,
        route=found.route if found else gone,
        exchanges=sorted({each.name for each in site.settings.topology.exchanges} | {site.settings.broker.exchange}),
        may_change=who.role.includes(Role.OPERATOR),
        may_discard=who.role.includes(Role.OWNER),
    )


@router.post("/routes/probe")
def probe_all(site: Here, who: Operator, group: Annotated[GroupId | None, Form()] = None) -> Response:
    """Let the relays try all routes now, or those of a group."""
    with suppress(NotFoundError):  # they work by now
        chosen = site.do(quarantine.list_, quarantine.ListRoutes(group=group), who) if group else []
        for begin in range(0, max(1, len(chosen)), MOST):
            some = tuple(route.id for route in chosen[begin : begin + MOST])
            site.do(quarantine.probe, quarantine.Probe(routes=some), who)
    return _back()


@router.post("/routes/pause")
def pause_route(
    site: Here, who: Operator, once: Once, *, routing_key: Name, exchange: Name = "", why: FormWords = ""
) -> Response:
    """Pause an address, whether it works or not."""
    asked = quarantine.PauseRoute(exchange=exchange, routing_key=routing_key, why=said(why))
    site.change(quarantine.pause, asked, who, once)
    return _back("#pauses")


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
    return _back(f"/{route}")


@router.post("/routes/{route}/reroute")
def reroute(
    site: Here,
    who: Operator,
    once: Once,
    *,
    route: Id,
    routing_key: Name = "",
    exchange: Name = "",
    why: FormWords = "",
) -> Response:
    """Send the rows of a route to another address; show the route of that address, where they wait for a probe."""
    asked = quarantine.Reroute(route=route, to_exchange=exchange, routing_key=routing_key, why=said(why))
    site.change(quarantine.reroute, asked, who, once)
    found = site.do(quarantine.list_, quarantine.ListRoutes(), who)
    here = [each.id for each in found if each.id == route]  # with rows that were on their way as a probe
    there = [each.id for each in found if (each.exchange, each.routing_key) == (exchange, routing_key)]
    return _back("".join(f"/{each}" for each in (here or there)[:1]))


@router.post("/routes/{route}/discard")
def discard(site: Here, who: Owner, once: Once, *, route: Id, why: FormWords = "") -> Response:
    """Order a job that gives up all rows of a route; the console runs it."""
    return site.order(quarantine.discard, quarantine.ChangeRoute(route=route, why=said(why)), who, once)


@router.post("/routes/lanes/pause")
def pause_lane(
    site: Here, who: Operator, once: Once, *, lane: Annotated[Lane, Form()], why: FormWords = ""
) -> Response:
    """Pause a lane."""
    site.change(lanes.pause, lanes.PauseLane(lane=lane, why=said(why)), who, once)
    return _back("#pauses")


@router.post("/routes/lanes/{lane}/resume")
def resume_lane(site: Here, who: Operator, once: Once, *, lane: Lane, why: FormWords = "") -> Response:
    """Let the relays carry a paused lane."""
    site.change(lanes.resume, lanes.ResumeLane(lane=lane, why=why), who, once)
    return _back("#pauses")


def _topology(
    request: Request, who: Identity, things: Sequence[Declared], route: int | None, *, is_done: bool
) -> HTMLResponse:
    order = list(WHAT_DECLARING_DOES)
    return page(
        request,
        "topology.html",
        things=sorted(things, key=lambda each: order.index(each.standing)),
        counts={standing: sum(each.standing is standing for each in things) for standing in order},
        bad=BAD,
        does=WHAT_DECLARING_DOES,
        there=Standing.THERE,
        route=route,
        is_done=is_done,
        may_declare=who.role.includes(Role.OWNER),
    )


def _released(site: Site, who: Identity, route: int) -> ReleasedRoute:
    """Return a route that has left the quarantine; NotFoundError when it was never there, or long ago."""
    lately = site.do(quarantine.released, quarantine.ListReleased(limit=MOST), who)
    found = next((each for each in lately if each.id == route), None)
    if found is None:
        raise NotFoundError(f"no route {route} is in quarantine, and no such route was lately: see /routes")
    return found


def _by_exchange(route_map: RouteMap) -> list[ExchangeWays]:
    names = dict.fromkeys(way.exchange for way in route_map.ways)
    return [ExchangeWays(name, [way for way in route_map.ways if way.exchange == name]) for name in names]


def _groups(routes: Sequence[RouteStatus]) -> list[RouteGroup]:
    """Return the routes by cause and exchange, the group with the most rows first."""
    members: dict[tuple[str, str], list[RouteStatus]] = {}
    for route in routes:
        members.setdefault((cause_of(route.reason), route.exchange), []).append(route)
    groups = [
        RouteGroup(route_group(found[0].reason, exchange), cause, exchange, found)
        for (cause, exchange), found in members.items()
    ]
    return sorted(groups, key=lambda each: -each.rows)


def _has(route: RouteStatus, words: str) -> bool:
    """Whether a route has these words in its address or its reason."""
    text = f"{route.exchange} {route.routing_key} {route.reason}".casefold()
    return words.casefold() in text


def _back(place: str = "") -> Response:
    return RedirectResponse(f"/routes{place}", HTTPStatus.SEE_OTHER)
