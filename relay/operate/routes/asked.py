"""What can be asked of routes that do not work, or that an operator has paused: the noun `quarantine`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import Field

from relay.config.settings import Settings
from relay.engine.send.message import UnsendableError
from relay.engine.send.routes import Router
from relay.errors import UsageError
from relay.operate.asked import (
    MOST,
    Closed,
    Cursor,
    Group,
    Id,
    Limit,
    MaybeReasoned,
    Next,
    Page,
    Reasoned,
    RowName,
    RowNames,
    ShortString,
    next_cursor,
    read_cursor,
)
from relay.operate.jobs import Ordered
from relay.operate.messages.whereabouts import row_id, row_ids
from relay.operate.operation import BULK_TIMEOUT, Effect, Role, Servers, operation
from relay.operate.routes import quarantine
from relay.operate.routes.listed import listed_for
from relay.operate.routes.pause import pause_route, resume_route
from relay.operate.routes.quarantine import Changed, ReleasedRoute, RouteStatus, WaitingRow
from relay.operate.routes.work import order_discard

ROWS = "quarantine"  # the list that a cursor is of


class ListRoutes(Closed):
    """Which routes."""

    group: Group = None


class RowPage(Closed):
    """Which page of the rows that wait."""

    cursor: Cursor = None
    limit: Limit = 100


class ShowRoute(RowPage):
    """Which route, and which page of its rows."""

    name: RowName


class RoutePage(Page):
    """A route with a page of its rows, by id."""

    route: RouteStatus
    topology: Annotated[tuple[str, ...], Field(description="What relay.toml lists that takes its messages.")]
    rows: list[WaitingRow]
    next: Next


class ListReleased(Closed):
    """How many routes."""

    limit: Limit = 100


class PreviewRoute(Closed):
    """Which rows of a route, and how many to show."""

    route: Id
    ids: RowNames = ()
    limit: Limit = 5


@dataclass(frozen=True, slots=True)
class RoutePreview:
    """What a reroute or discard would change."""

    route: RouteStatus
    rows: int
    oldest: datetime | None  # when the first of them was written
    first: list[WaitingRow]


class ChangeRoute(Reasoned):
    """Rows of a route, and why they are changed."""

    route: Id
    ids: Annotated[RowNames, Field(description="All of the route unless given.")] = ()


class Reroute(ChangeRoute):
    """Where the rows go from now on: at least one of the two."""

    to_exchange: Annotated[ShortString | None, Field(description='"" addresses a queue.')] = None
    routing_key: ShortString | None = None


class Probe(Closed):
    """Which routes to try."""

    routes: Annotated[tuple[Id, ...], Field(max_length=MOST, description="All unless given.")] = ()


class Probed(Closed):
    """The routes that the relays were asked to try."""

    routes: list[int]


class PauseRoute(Reasoned):
    """Which address is paused, and why."""

    exchange: Annotated[ShortString, Field(description='"" addresses a queue.')]
    routing_key: ShortString


class ResumeRoute(MaybeReasoned):
    """Which paused route goes on, and why."""

    route: Id


@operation("quarantine.list", "GET /quarantine", Role.VIEWER)
def list_(at: Servers, asked: ListRoutes) -> list[RouteStatus]:
    """List the routes in quarantine, the oldest first."""
    with at.connect(None) as tables:
        if asked.group is not None:
            return quarantine.routes_of_group(tables, asked.group)
        return quarantine.list_routes(tables)


@operation("quarantine.preview", "GET /quarantine/preview", Role.VIEWER)
def preview(at: Servers, asked: PreviewRoute) -> RoutePreview:
    """Count what a reroute or discard would change now, and show the first rows."""
    rows = row_ids(asked.ids)
    with at.connect(BULK_TIMEOUT) as tables:
        found = quarantine.read_route(tables, asked.route)
        number, oldest = quarantine.count_chosen(tables, found, rows)
        first = quarantine.list_chosen(tables, asked.route, rows, limit=asked.limit)
    return RoutePreview(found, number, oldest, first)


@operation("quarantine.show", "GET /quarantine/{name}", Role.VIEWER)
def show(at: Servers, asked: ShowRoute) -> RoutePage:
    """Show the route of this number, or that in which the row of this id waits, and its first rows."""
    named, after = row_id(asked.name), read_cursor(ROWS, asked.cursor) or 0
    with at.connect(None) as tables:
        route = quarantine.route_of(tables, named)
        rows = quarantine.list_rows(tables, route.id, limit=asked.limit, after=after)
    listed = listed_for(at.settings.topology, route.exchange, route.routing_key)
    following = next_cursor(ROWS, [row.id for row in rows], asked.limit)
    return RoutePage(route=route, topology=tuple(listed), rows=rows, next=following)


@operation("quarantine.released", "GET /quarantine/released", Role.VIEWER)
def released(at: Servers, asked: ListReleased) -> list[ReleasedRoute]:
    """List the routes that have left the quarantine lately, the newest first: 1,000 are kept."""
    with at.connect(None) as tables:
        return quarantine.list_released(tables, limit=asked.limit)


@operation("quarantine.reroute", "POST /quarantine/reroute", Role.OPERATOR, Effect.ELSEWHERE)
def reroute(at: Servers, asked: Reroute) -> Changed:
    """Send the rows of a route to another exchange or routing key, in order per key; the relay tries it first."""
    if asked.to_exchange is None and asked.routing_key is None:
        raise UsageError("give to_exchange, routing_key, or both: where the rows go from now on")
    for name in ("to_exchange", "routing_key"):
        if len((getattr(asked, name) or "").encode()) > 255:
            raise UsageError(f"{name} is longer than the 255 bytes that AMQP allows")
    rows = row_ids(asked.ids)
    _check_exchange(at.settings, asked.to_exchange)
    with at.connect(BULK_TIMEOUT) as tables:
        found = quarantine.read_route(tables, asked.route)
        exchange, key = found.rerouted(asked.to_exchange, asked.routing_key)
        return quarantine.reroute(tables, found, rows, exchange=exchange, routing_key=key, by=at.by, why=asked.why)


@operation("quarantine.discard", "POST /quarantine/discard", Role.OWNER, Effect.ORDERED)
def discard(at: Servers, asked: ChangeRoute) -> Ordered:
    """Give up the rows of a route: they are kept and never sent; rows behind them go out."""
    rows = row_ids(asked.ids)
    with at.connect(BULK_TIMEOUT) as tables:
        found = quarantine.read_route(tables, asked.route)
        not_found = quarantine.not_chosen(tables, asked.route, rows)
        job = order_discard(tables, found, rows, by=at.by, why=asked.why, by_console=at.by_console)
    return Ordered(job, not_found)


@operation("quarantine.probe", "POST /quarantine/probe", Role.OPERATOR, Effect.ELSEWHERE)
def probe(at: Servers, asked: Probe) -> Probed:
    """Ask the running relays to try routes now: those given, or all."""
    with at.connect(None) as tables:
        named = [quarantine.read_route(tables, route) for route in asked.routes]
        _check_running(named)
        found = [each.id for each in named or quarantine.list_routes(tables) if each.paused_at is None]
        quarantine.probe(tables, found)
    return Probed(routes=found)


@operation("quarantine.pause", "POST /quarantine/pause", Role.OPERATOR, Effect.STORED)
def pause(at: Servers, asked: PauseRoute) -> RouteStatus:
    """Let the messages for an address wait; what is in flight is still sent."""
    with at.connect(None) as tables:
        return pause_route(tables, asked.exchange, asked.routing_key, by=at.by, why=asked.why)


@operation("quarantine.resume", "POST /quarantine/resume", Role.OPERATOR, Effect.STORED)
def resume(at: Servers, asked: ResumeRoute) -> RouteStatus:
    """Let the relays try a paused route now; its messages go when it works."""
    with at.connect(None) as tables:
        return resume_route(tables, asked.route, by=at.by, why=asked.reason)


def _check_exchange(settings: Settings, exchange: str | None) -> None:
    """Refuse an exchange that rows may not name.

    Raises:
        UsageError: the relay would park them.
    """
    if exchange is None:
        return
    try:
        Router.of(settings).check_exchange(exchange.encode())
    except UnsendableError as error:
        raise UsageError(f"{error}: the relay would park the rows") from None


def _check_running(routes: Sequence[RouteStatus]) -> None:
    """Refuse routes that an operator has paused.

    Raises:
        UsageError: an operator wants a route to wait, which a probe would try.
    """
    if paused := [str(each.id) for each in routes if each.paused_at is not None]:
        raise UsageError(f"paused, so not tried: route {', '.join(paused)}; `relay quarantine resume` tries it")
