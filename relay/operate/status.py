"""How the outbox is doing, from its tables alone: nothing here asks a relay or the broker."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Identifier

from relay.engine.send.message import NOT_SENT
from relay.operate.health import NODE_STALE_AFTER, OutboxState
from relay.operate.holders import foreign_locks, long_holders
from relay.operate.quarantine import RouteStatus, list_routes

# Seconds that a row may wait before a relay must be seen working on it. It cannot follow from `relay.stall_after`: that
# is each relay's own, counts from its last mark and stands in no table. Here all that is known is how long a row has
# waited. A relay has time to notice by itself (after 5 s) and to say so, which is then among the reasons.
STALLED_AFTER = 10.0
LANES = 16
ROUTES_TOLD = 10  # among the reasons; `quarantined_routes` has them all

# With what marks have counted and no heartbeat has added yet: a killed node leaves some of it.
READ_NODES = SQL("""
    SELECT name, lanes, in_flight, state, reasons, version, started_at, can_deliver, standby,
           heartbeat_at AS last_heartbeat,
           extract(epoch FROM clock_timestamp() - heartbeat_at)::float8 AS heartbeat_age_s,
           (published_total + coalesce((
               SELECT sum(messages) FROM {schema}.published AS mark WHERE mark.node = name AND position > published_to
           ), 0))::bigint AS published_total,
           clock_timestamp() - heartbeat_at <= {stale_after} * interval '1 second' AS alive
    FROM {schema}.node
    WHERE heartbeat_at > now() - interval '1 day'
    ORDER BY name
""")

COUNT_PUBLISHED = SQL("""
    SELECT coalesce((SELECT sum(published_total) FROM {schema}.node), 0)::bigint + coalesce((
        SELECT sum(messages) FROM {schema}.published AS mark LEFT JOIN {schema}.node ON name = mark.node
        WHERE position > coalesce(published_to, 0)
    ), 0)::bigint
""")

COUNT_PENDING = SQL("SELECT messages FROM {schema}.message_count WHERE state = 'pending'")
COUNT_PARKED = SQL("""
    SELECT count(*), count(*) FILTER (WHERE held_behind IS NULL) FROM {schema}.message_state WHERE state = 'parked'
""")
COUNT_NOT_SENT = SQL(
    "SELECT count(*) FROM {schema}.message_state WHERE state = 'parked' AND starts_with(last_error, {words})"
)

# Since when the first row of each lane waits. A row scheduled for next week must not look
# like one that has waited since last week: it waits since its available_at.
# So a backlog of a million rows costs what one of ten does.
OLDEST_PENDING = SQL("SELECT extract(epoch FROM now() - min(since))::float8 FROM {schema}.message_waits")

# Refused rows that wait for their next attempt; and of these, those for which it is not overdue.
COUNT_REFUSED = SQL("""
    SELECT count(*), count(*) FILTER (WHERE available_at > now() - {stalled_after} * interval '1 second')
    FROM {schema}.message_state
    WHERE state = 'pending' AND available_at IS NOT NULL AND attempts > 0
""")

# Statistics taken while the table was empty would make the planner read all of it, once a lane. What is late in the log
# is found by a bitmap alone.
BY_ORDER = SQL("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
BY_INDEX = SQL("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off")


@dataclass(frozen=True, slots=True)
class Node:
    """A relay as its row in `node` tells."""

    name: str
    lanes: list[int]
    in_flight: int
    published_total: int  # rows that relays of this name have marked as sent
    state: str
    reasons: list[str]
    version: str
    started_at: datetime
    can_deliver: bool  # it has a connection to the broker that works
    standby: bool
    last_heartbeat: datetime
    heartbeat_age_s: float
    alive: bool  # the heartbeat is fresh


@dataclass(frozen=True, slots=True)
class Status:
    """What `relay status` tells; the field names are the keys of its JSON."""

    state: OutboxState
    reasons: list[str]
    pending: int
    in_flight: int
    parked: int
    parked_held: int  # of these, rows that only wait behind another one of their key
    quarantined: int
    quarantined_routes: list[RouteStatus]
    oldest_pending_age_s: float | None
    published_total: int
    nodes: list[Node]


def read_status(connection: psycopg.Connection, schema: str, *, progress_timeout: float = 3.0) -> Status:
    """Read how the outbox is doing.

    When rows have waited for long although a relay is alive, it watches for up to `progress_timeout` seconds whether
    anything goes out. A large backlog being worked off is no stall. Give it three heartbeats, since the counters move
    with them.
    """
    names = {"schema": Identifier(schema)}
    # One snapshot for all figures: a row that is being parked must not be counted twice, or not at all.
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        nodes = _nodes(connection, schema)
        routes = list_routes(connection, schema)
        (published,) = _numbers(connection, COUNT_PUBLISHED.format(**names))
        pending = _numbers(connection, COUNT_PENDING.format(**names))[0]
        parked, parked_heads = _numbers(connection, COUNT_PARKED.format(**names))
        (not_sent,) = _numbers(connection, COUNT_NOT_SENT.format(**names, words=NOT_SENT))
        connection.execute(BY_ORDER)
        oldest = connection.execute(OLDEST_PENDING.format(**names)).fetchone()
        connection.execute(BY_INDEX)
        refused, tried_on = _numbers(connection, COUNT_REFUSED.format(**names, stalled_after=STALLED_AFTER))
    oldest_age = None if oldest is None or oldest[0] is None else max(0.0, float(oldest[0]))
    waits = oldest_age is not None and oldest_age > STALLED_AFTER
    # Rows behind a refused one of their key wait with it: that is a fault of the row, and it will be parked.
    worked_on = tried_on > 0 and any(node.alive for node in nodes)
    stalled = waits and not worked_on and not _progresses(connection, schema, nodes, progress_timeout)
    reasons = _reasons(nodes, pending, oldest_age if stalled else None)
    reasons += _row_reasons(refused, parked_heads, parked - parked_heads, not_sent)
    reasons += [route_reason(route) for route in routes[:ROUTES_TOLD]]
    if len(routes) > ROUTES_TOLD:
        reasons.append(f"{len(routes) - ROUTES_TOLD} more routes do not work")
    reasons += [str(lock) for lock in foreign_locks(connection, schema)]
    reasons += [str(holder) for holder in long_holders(connection)]
    return Status(
        state=OutboxState.STALLED if stalled else OutboxState.DEGRADED if reasons else OutboxState.OK,
        reasons=reasons,
        pending=pending,
        in_flight=sum(node.in_flight for node in nodes if node.alive),
        parked=parked,
        parked_held=parked - parked_heads,
        quarantined=sum(route.rows for route in routes),
        quarantined_routes=routes,
        oldest_pending_age_s=None if oldest_age is None else round(oldest_age, 3),
        published_total=published,  # also by nodes that are gone for more than a day, and not listed any more
        nodes=nodes,
    )


def _nodes(connection: psycopg.Connection, schema: str) -> list[Node]:
    with connection.cursor(row_factory=class_row(Node)) as cursor:
        return cursor.execute(READ_NODES.format(schema=Identifier(schema), stale_after=NODE_STALE_AFTER)).fetchall()


def _numbers(connection: psycopg.Connection, query: psycopg.sql.Composed) -> tuple[int, ...]:
    row = connection.execute(query).fetchone()
    assert row is not None, "an aggregate gives one row"  # noqa: S101
    return row


def _progresses(connection: psycopg.Connection, schema: str, before: Sequence[Node], timeout: float) -> bool:
    """Return whether a relay that is alive publishes anything within `timeout` seconds."""
    published = {node.name: node.published_total for node in before if node.alive}
    deadline = time.monotonic() + timeout
    while published and time.monotonic() < deadline:
        time.sleep(0.1)
        for node in _nodes(connection, schema):
            if node.name in published and node.published_total != published[node.name]:
                return True
    return False


def _reasons(nodes: Sequence[Node], pending: int, stalled_for: float | None) -> list[str]:
    alive = [node for node in nodes if node.alive]
    reasons = []
    if not alive:
        reasons.append("no relay is alive: start `relay run`")
    elif stalled_for is not None:
        reasons.append(f"nothing goes out, and the oldest pending row has waited {stalled_for:.0f} s")
    reasons += [f"relay {node.name}: {reason}" for node in alive for reason in node.reasons]
    reasons += [
        f"relay {node.name} is {node.state}" for node in alive if node.state != OutboxState.OK and not node.reasons
    ]
    free = sorted(set(range(LANES)) - {lane for node in alive for lane in node.lanes})
    if alive and free and pending:
        reasons.append(f"no relay holds {'lane' if len(free) == 1 else 'lanes'} {', '.join(map(str, free))}")
    return reasons


def _row_reasons(refused: int, parked: int, held: int, not_sent: int) -> list[str]:
    reasons = []
    if refused:
        reasons.append(f"{refused} refused by the broker, to be tried again")
    if parked:
        behind = f", {held} held behind {'it' if parked == 1 else 'them'}" if held else ""
        by_us = f", {not_sent} refused by the relay and not by the broker" if not_sent else ""
        reasons.append(f"{parked} parked{behind}{by_us}: see `relay parked list`")
    return reasons


def route_reason(route: RouteStatus) -> str:
    """Return what does not work, since when, and for how many rows."""
    rows = "1 row waits" if route.rows == 1 else f"{route.rows} rows wait"
    since = f"{route.since:%Y-%m-%d %H:%M:%S %Z}"
    return (
        f"{route.address} does not work since {since}, {rows}: {route.reason}; see `relay quarantine show {route.id}`"
    )
