"""Routes in quarantine as an operator handles them: listed, shown, tried now, their rows sent elsewhere or given up.

A relay may run meanwhile. Every change takes the lock on the route's row that the relay takes to let rows out. It
leaves the rows in quarantine: the relay alone makes them pending, in the order of their keys.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, assert_never
from uuid import UUID

from psycopg.sql import SQL

from relay.engine.session.session import ROUTES_CHANGED, nodes_channel
from relay.engine.settle.quarantine import PROBE_INITIAL, PROBE_MAX, PROBES_A_SECOND
from relay.errors import NotFoundError, UsageError
from relay.observe.printable import utc
from relay.operate.cause import cause_of, group_of
from relay.operate.messages.whereabouts import RowId, WhyMissing, as_parameters, find_rows, whereabouts
from relay.servers.postgres.tables import Tables

SOURCE = "quarantine"  # of a failure group
PROBE_WAIT, PROBE_POLL = 10.0, 0.1  # seconds: a probe is answered within about five

# A row that only waits behind another one of its key; it keeps its own address.
IS_BEHIND = SQL("held_behind IS NOT NULL")
# Of the rows of a route those that are bound for it: all, or those named.
CHOSEN = SQL("""state = 'quarantined' AND quarantine = %(route)s AND NOT {is_behind}
        AND (%(all)s OR id = ANY (%(ids)s::bigint[]) OR message_id = ANY (%(message_ids)s::uuid[]))""").format(
    is_behind=IS_BEHIND
)

# A probe gets the moment of `probed_at` for its `available_at`, and keeps it when it comes back (TAKE_PROBE).
READ_ROUTES = SQL("""
    SELECT route.id, route.exchange, route.routing_key, route.reason, route.since, route.probes, route.probed_at,
           CASE WHEN paused_at IS NULL THEN coalesce(route.probed_at, route.since) + interval '1 second' * least(
               {initial} * 2 ^ least(route.probes, 30),
               greatest({maximum}, (count(*) OVER ())::float8 / {a_second})
           ) END AS next_probe_by,
           route.paused_at, route.paused_by, route.paused_why,
           waiting.rows, waiting.behind, waiting.oldest,
           -- By the index of `available_at`, and only for a route whose probe has not come back.
           CASE WHEN probes = 0 OR paused_at IS NOT NULL OR waiting.has_returned THEN 0 ELSE (
               SELECT count(*) FROM {schema}.message_state AS probe
               WHERE probe.state = 'pending' AND probe.available_at = route.probed_at AND probe.quarantine = route.id
           ) END AS probing,
           CASE WHEN paused_at IS NOT NULL THEN NULL WHEN probes = 0 THEN 'awaited'
               WHEN waiting.has_returned THEN 'returned' ELSE 'under way' END AS last_probe
    FROM {schema}.quarantine AS route
    CROSS JOIN LATERAL (
        SELECT count(*) AS rows, count(*) FILTER (WHERE {is_behind}) AS behind, min(created_at) AS oldest,
            coalesce(bool_or(available_at = route.probed_at), false) AS has_returned
        FROM {schema}.message_state
        WHERE state = 'quarantined' AND quarantine = route.id
    ) AS waiting
    ORDER BY route.since, route.id
""")


# Of the last probe: no relay has sent it yet; it has no answer yet; its row is back.
ProbeStanding = Literal["awaited", "under way", "returned"]


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """An address that does not work, or that an operator has paused; its rows wait until one of them gets through."""

    id: int
    exchange: str
    routing_key: str
    reason: str  # in the broker's words, or who has sent rows here or paused it
    since: datetime
    probes: int  # how often it was tried
    probed_at: datetime | None
    next_probe_by: datetime | None  # a running relay tries it again, at the latest; None while it is paused
    paused_at: datetime | None
    paused_by: str | None
    paused_why: str | None
    rows: int
    behind: int  # of these, rows that only wait behind another row of their key
    oldest: datetime | None
    probing: int  # rows that are on their way as the last probe, and so not among `rows`
    last_probe: ProbeStanding | None  # None while the route is paused

    @property
    def address(self) -> str:
        return f"exchange {self.exchange!r}, routing key {self.routing_key!r}"

    @property
    def waiting(self) -> int:
        """How many rows wait for the route, the probe on its way included."""
        return self.rows + self.probing

    @property
    def failed(self) -> int:
        """How many rows the route keeps from going out: `waiting` but for those behind another row of their key."""
        return self.waiting - self.behind

    @property
    def probe_words(self) -> str:
        """What came of the last probe."""
        at = "" if self.probed_at is None else f"probe at {utc(self.probed_at)}: "
        match self.last_probe:
            case None:
                return "paused: not tried"
            case "awaited":
                return "waits for a relay to try it"
            case "under way":
                return f"{at}under way"
            case "returned":
                return f"{at}not accepted: {self.reason}"
            case _:
                assert_never(self.last_probe)

    def rerouted(self, exchange: str | None, routing_key: str | None) -> tuple[str, str]:
        """Return the address of rows that get this exchange, this routing key, or both, in place of the route's."""
        return (
            self.exchange if exchange is None else exchange,
            self.routing_key if routing_key is None else routing_key,
        )


READ_RELEASED = SQL("""
    SELECT id, exchange, routing_key, reason, since, probes, probed_at, released_at
    FROM {schema}.quarantine_released
    ORDER BY released_at DESC, id
    LIMIT %(limit)s
""")


@dataclass(frozen=True, slots=True)
class ReleasedRoute:
    """A route that has left the quarantine: the broker takes its messages, or no row waited for it any more."""

    id: int
    exchange: str
    routing_key: str
    reason: str  # why it was in quarantine
    since: datetime
    probes: int
    probed_at: datetime | None
    released_at: datetime

    @property
    def probe_words(self) -> str:
        """When it was let go, and tried last."""
        probe = "without a probe" if self.probed_at is None else f"after the probe at {utc(self.probed_at)}"
        return f"released at {utc(self.released_at)}, {probe}"


def list_released(tables: Tables, *, limit: int) -> list[ReleasedRoute]:
    """Return the routes that have left the quarantine lately, the newest first."""
    return tables.rows(ReleasedRoute, READ_RELEASED, {"limit": limit})


def list_routes(tables: Tables) -> list[RouteStatus]:
    """Return the routes in quarantine, the oldest first."""
    probes = {"initial": PROBE_INITIAL, "maximum": PROBE_MAX, "a_second": PROBES_A_SECOND}
    return tables.rows(RouteStatus, READ_ROUTES, is_behind=IS_BEHIND, **probes)


def routes_of_group(tables: Tables, group: str) -> list[RouteStatus]:
    """Return the routes of a group, the oldest first.

    Raises:
        NotFoundError: no route in quarantine is of this group.
    """
    routes = [each for each in failing_routes(tables) if route_group(each.reason, each.exchange) == group]
    if not routes:
        raise NotFoundError(f"no route of failure group {group} is in quarantine: see `relay failures list`")
    return routes


def failing_routes(tables: Tables) -> list[RouteStatus]:
    """Return the routes in quarantine that nobody has paused: a pause is no failure."""
    return [each for each in list_routes(tables) if each.paused_at is None]


def route_group(reason: str, exchange: str) -> str:
    """Return the id of the group of a route in quarantine."""
    return group_of(SOURCE, cause_of(reason), None, exchange)


def read_route(tables: Tables, route: int) -> RouteStatus:
    """Return one route.

    Raises:
        NotFoundError: it is not in quarantine; the message says where the row of this id is.
    """
    for each in list_routes(tables):
        if each.id == route:
            return each
    row = find_rows(tables, [route])[route]
    where = "" if isinstance(row, str) else f"; if you mean row {route}, {row.words}"
    raise NotFoundError(f"no route {route} is in quarantine{where}: `relay quarantine list` names the routes")


def route_of(tables: Tables, named: RowId) -> RouteStatus:
    """Return the route of this id; else the one in which the row of this id or message id waits.

    Raises:
        NotFoundError: neither is in quarantine; the message says where the row is.
    """
    for each in list_routes(tables):
        if each.id == named:
            return each
    row = find_rows(tables, [named])[named]
    if isinstance(row, WhyMissing) or row.state != "quarantined" or row.quarantine is None:
        raise NotFoundError(f"neither a route nor a row in quarantine has the id {named}: {row.words}")
    return read_route(tables, row.quarantine)


READ_ROWS = SQL("""
    SELECT id, message_id, aggregate_type, aggregate_id, event_type, created_at, attempts, last_error
    FROM {schema}.message_state
    WHERE {which} AND id > %(after)s
    ORDER BY id
    LIMIT %(limit)s
""")
OF_ROUTE = SQL("state = 'quarantined' AND quarantine = %(route)s")


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row of a route, without its payload."""

    id: int
    message_id: UUID
    aggregate_type: str
    aggregate_id: str | None
    event_type: str
    created_at: datetime
    attempts: int
    last_error: str | None


def list_rows(tables: Tables, route: int, *, limit: int, after: int = 0) -> list[WaitingRow]:
    """Return the first rows of a route behind the id `after`, by id."""
    values = {**parameters(route, []), "limit": limit, "after": after}
    return tables.rows(WaitingRow, READ_ROWS, values, which=OF_ROUTE)


def list_chosen(tables: Tables, route: int, rows: Sequence[RowId], *, limit: int) -> list[WaitingRow]:
    """Return the first rows that `reroute` or `discard` would change now, by id."""
    values = {**parameters(route, rows), "limit": limit, "after": 0}
    return tables.rows(WaitingRow, READ_ROWS, values, which=CHOSEN)


@dataclass(frozen=True, slots=True)
class Changed:
    """What a reroute did."""

    route: int
    rows: int
    left_out: list[str]  # what was not done, with the reason


MOVE = SQL("""
    WITH moved AS (
        UPDATE {schema}.message
        SET exchange = %(exchange)s, routing_key = %(routing_key)s, quarantine = %(to)s, last_error = %(words)s
        WHERE {chosen}
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    SELECT 'quarantine reroute', id::text, %(by)s, %(why)s FROM moved
""")
# The rows behind them go along, so that they are let go together; each keeps its address.
MOVE_FOLLOWERS = SQL("""
    UPDATE {schema}.message SET quarantine = %(to)s
    WHERE state = 'quarantined' AND quarantine = %(route)s AND {is_behind}
""")
# Its tries are counted from zero: the relay takes that for "now" (relay/engine/settle/quarantine.py).
ENTER = SQL("""
    INSERT INTO {schema}.quarantine (exchange, routing_key, reason)
    VALUES (%(exchange)s, %(routing_key)s, %(words)s)
    ON CONFLICT (exchange, routing_key) DO UPDATE SET probes = 0
    RETURNING id
""")


def reroute(
    tables: Tables, route: RouteStatus, rows: Sequence[RowId], *, exchange: str, routing_key: str, by: str, why: str
) -> Changed:
    """Send the rows of a route, or those named, to another address, in one transaction.

    They wait for the new address in quarantine: the relay tries it with one row, and lets the others follow in order.
    A row that is on its way as a probe has no new address; it is waited for.

    Raises:
        UsageError: they have this address already.
        NotFoundError: the route is not in quarantine any more.
    """
    if (exchange, routing_key) == (route.exchange, route.routing_key):
        raise UsageError(f"the rows of route {route.id} have this address already: {route.address}")
    to = {
        "exchange": exchange, "routing_key": routing_key, "words": f"rerouted by {by}: {why}", "by": by, "why": why,
    }  # fmt: skip
    values = parameters(route.id, rows)
    deadline = time.monotonic() + PROBE_WAIT
    while True:
        if time.monotonic() < deadline and tables.execute(PROBES_ON_THEIR_WAY, values).rowcount:
            time.sleep(PROBE_POLL)  # without the route's lock, which the relay needs to bring a probe back
            continue
        with tables.transaction():
            if tables.execute(LOCK_ROUTE, values).rowcount == 0:
                raise NotFoundError(f"route {route.id} is not in quarantine any more: its rows are on their way")
            probes = [id_ for (id_,) in tables.execute(PROBES_ON_THEIR_WAY, values)]
            if not probes or time.monotonic() >= deadline:
                left_out = not_chosen(tables, route.id, rows, probes=probes)
                (entered,) = tables.one(ENTER, to)
                moved = tables.execute(MOVE, {**values, **to, "to": entered}, chosen=CHOSEN).rowcount
                if not rows:
                    tables.execute(MOVE_FOLLOWERS, {**values, "to": entered}, is_behind=IS_BEHIND)
                # What is left in the route waits for no more than it did: try it now.
                probe(tables, [route.id])
                return Changed(route.id, moved, left_out)


COUNT_CHOSEN = SQL("SELECT count(*), min(created_at) FROM {schema}.message_state WHERE {chosen}")


def count_chosen(tables: Tables, route: RouteStatus, rows: Sequence[RowId]) -> tuple[int, datetime | None]:
    """Return how many rows `reroute` or `discard` would change now, and when the oldest was written."""
    number, oldest = tables.one(COUNT_CHOSEN, parameters(route.id, rows), chosen=CHOSEN)
    return number, oldest


TRY_NOW = SQL("UPDATE {schema}.quarantine SET probes = 0 WHERE id = ANY (%(routes)s::bigint[])")


def probe(tables: Tables, routes: Sequence[int]) -> None:
    """Ask the running relays to try these routes now."""
    with tables.transaction():
        tables.execute(TRY_NOW, {"routes": list(routes)})
        ring(tables, ROUTES_CHANGED)


LOCK_ROUTE = SQL("SELECT FROM {schema}.quarantine WHERE id = %(route)s FOR UPDATE")
PROBES_ON_THEIR_WAY = SQL("""
    SELECT id FROM {schema}.message_state
    WHERE state = 'pending' AND quarantine = %(route)s
        AND (%(all)s OR id = ANY (%(ids)s::bigint[]) OR message_id = ANY (%(message_ids)s::uuid[]))
""")
READ_CHOSEN = SQL("SELECT id, message_id FROM {schema}.message_state WHERE {chosen} AND NOT %(all)s")
RING = SQL("SELECT pg_notify(%(channel)s, %(word)s)")


def not_chosen(tables: Tables, route: int, rows: Sequence[RowId], *, probes: Sequence[int] = ()) -> list[str]:
    """Return what was named and cannot be changed now, with the reason.

    Args:
        probes: rows of the route that are on their way, to be told when no row is named.
    """
    values = parameters(route, rows)
    chosen: set[RowId] = set()
    for row in tables.execute(READ_CHOSEN, values, chosen=CHOSEN):
        chosen.update(row)
    missing = [each for each in rows or probes if each not in chosen]
    where = whereabouts(tables, missing)
    return [f"{each} is left as it is: {where[each]}" for each in missing]


def parameters(route: int, rows: Sequence[RowId]) -> dict[str, Any]:
    """Return what CHOSEN takes: all rows of the route, or those named."""
    return {"route": route, "all": not rows, **as_parameters(rows)}


def ring(tables: Tables, word: str = "") -> None:
    """Notify the running relays that something has changed that they must obey."""
    tables.execute(RING, {"channel": nodes_channel(tables.schema), "word": word})
