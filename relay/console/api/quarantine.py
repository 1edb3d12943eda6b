"""`/quarantine`: what waits for a route that does not work, or that an operator has paused."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Once
from relay.console.api.paging import next_cursor, read_cursor
from relay.console.api.parameters import row_id
from relay.console.given import Operations, Operator, Owner, Viewer, within
from relay.console.site import site_of
from relay.errors import UsageError
from relay.operate.asked import (
    MOST,
    Closed,
    Cursor,
    Group,
    Id,
    Limit,
    MaybeReasoned,
    Reasoned,
    RowName,
    RowNames,
    ShortString,
)
from relay.operate.messages.whereabouts import row_ids
from relay.operate.routes.quarantine import Changed, RouteStatus, WaitingRow
from relay.operations.results import Ordered, RoutePreview

router = APIRouter(prefix="/quarantine", tags=["quarantine"])
KIND = "quarantine"


class RoutePage(Closed):
    """A route with a page of its rows, by id."""

    route: RouteStatus
    rows: list[WaitingRow]
    next: Annotated[str | None, Field(description="The cursor of the next page; null on the last one.")]


class Chosen(Reasoned):
    """Rows of a route, and why they are changed."""

    route: Id
    ids: Annotated[RowNames, Field(description="All of the route unless given.")] = ()


class Reroute(Chosen):
    """Where the rows go from now on: at least one of the two."""

    to_exchange: Annotated[ShortString | None, Field(description='"" addresses a queue.')] = None
    routing_key: ShortString | None = None


class Probe(Closed):
    """Which routes to try."""

    routes: Annotated[tuple[Id, ...], Field(max_length=MOST, description="All unless given.")] = ()


class Probed(Closed):
    """The routes that the relays were asked to try."""

    routes: list[int]


class Pause(Reasoned):
    """Which address is paused, and why."""

    exchange: Annotated[ShortString, Field(description='"" addresses a queue.')]
    routing_key: ShortString


class Resume(MaybeReasoned):
    """Which paused route goes on, and why."""

    route: Id


@router.get("")
def list_(operations: Operations, _: Viewer, group: Group = None) -> list[RouteStatus]:
    """List the routes in quarantine, the oldest first."""
    return operations.list_routes(group=group)


@router.get("/preview")
def preview(
    operations: Operations,
    _: Viewer,
    route: Id,
    ids: Annotated[tuple[RowName, ...], Query(max_length=MOST)] = (),
    limit: Limit = 5,
) -> RoutePreview:
    """Count what a reroute or discard would change now, and show the first rows."""
    return operations.preview_route(route, row_ids(ids), limit=limit)


@router.get("/{name}")
def show(operations: Operations, _: Viewer, name: RowName, cursor: Cursor = None, limit: Limit = 100) -> RoutePage:
    """Show the route of this number, or that in which the row of this id waits, and its first rows."""
    found = operations.show_route(row_id(name), limit=limit, after=read_cursor(KIND, cursor) or 0)
    return RoutePage(route=found.route, rows=found.rows, next=next_cursor(KIND, [row.id for row in found.rows], limit))


@router.post("/reroute", response_model=Changed)
def reroute(operations: Operations, once: Once, who: Operator, asked: Reroute) -> Response:
    """Send the rows of a route to another exchange or routing key, in order per key; the relay tries it first."""
    if asked.to_exchange is None and asked.routing_key is None:
        raise UsageError("give to_exchange, routing_key, or both: where the rows go from now on")
    for name in ("to_exchange", "routing_key"):
        if len((getattr(asked, name) or "").encode()) > 255:
            raise UsageError(f"{name} is longer than the 255 bytes that AMQP allows")
    rows = row_ids(asked.ids)
    return once.noted(
        who.name,
        Changed,
        lambda: operations.reroute(
            asked.route,
            rows,
            to_exchange=asked.to_exchange,
            routing_key=asked.routing_key,
            by=who.name,
            why=asked.why,
        ),
    )


@router.post("/discard", status_code=HTTPStatus.ACCEPTED, response_model=Ordered)
def discard(request: Request, once: Once, who: Owner, asked: Chosen) -> Response:
    """Give up the rows of a route: they are kept and never sent; rows behind them go out."""
    rows = row_ids(asked.ids)
    answer = once.in_transaction(
        who.name,
        Ordered,
        lambda connection: within(request, connection).order_discard(asked.route, rows, by=who.name, why=asked.why),
        status=HTTPStatus.ACCEPTED,
    )
    site_of(request).runner.wake()
    return answer


@router.post("/probe", response_model=Probed)
def probe(operations: Operations, once: Once, who: Operator, asked: Probe) -> Response:
    """Ask the running relays to try routes now: those given, or all."""
    return once.noted(who.name, Probed, lambda: Probed(routes=operations.probe(asked.routes)))


@router.post("/pause", response_model=RouteStatus)
def pause(request: Request, once: Once, who: Operator, asked: Pause) -> Response:
    """Let the messages for an address wait; what is in flight is still sent."""
    return once.in_transaction(
        who.name,
        RouteStatus,
        lambda connection: within(request, connection).pause_route(
            asked.exchange, asked.routing_key, by=who.name, why=asked.why
        ),
    )


@router.post("/resume", response_model=RouteStatus)
def resume(request: Request, once: Once, who: Operator, asked: Resume) -> Response:
    """Let the relays try a paused route now; its messages go when it works."""
    return once.in_transaction(
        who.name,
        RouteStatus,
        lambda connection: within(request, connection).resume_route(asked.route, by=who.name, why=asked.reason),
    )
