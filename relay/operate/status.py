"""How the outbox is doing, from its tables alone: nothing here asks a relay or the broker."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from psycopg.sql import SQL

from relay.engine.session.session import LANES
from relay.operate.asked import Nothing
from relay.operate.health import OutboxState, is_alive
from relay.operate.holders import (
    HeldUp,
    LaneHolder,
    commits_without_standby,
    foreign_locks,
    held_up,
    ids_used_up,
    lane_holders,
    long_holders,
)
from relay.operate.lanes import LaneStatus, list_lanes
from relay.operate.operation import Role, Servers, operation
from relay.operate.routes.quarantine import RouteStatus, list_routes
from relay.operate.runbooks import Guided, Runbook, of_relay
from relay.servers.postgres.tables import Tables

# Seconds that a row may wait before a relay must be seen working on it. It cannot follow from `relay.stall_after`: that
# is each relay's own, counts from its last mark and stands in no table. Here all that is known is how long a row has
# waited. A relay has time to notice by itself (after 5 s) and to say so, which is then among the reasons.
STALLED_AFTER = 10.0
STALLED_UNABLE_AFTER = 1.0  # when no relay is alive and can deliver
MOMENT = "%Y-%m-%d %H:%M:%S %Z"  # among the reasons
LOOKED_AT = 50_000  # rows that wait in a state, when asked whose rows hold up whose; the doctor looks at all
RELAYS_NAMED = 3  # by name, for one reason; `nodes` has them all
GONE_FOR = 3600.0  # seconds for which a relay that was killed is a reason
ROUTES_NAMED = 10  # among the reasons, and of one exchange; `quarantined_routes` has them all

# With what marks have counted and no heartbeat has added yet: a killed node leaves some of it.
READ_NODES = SQL("""
    SELECT name, lanes, in_flight, state, reasons, version, started_at, can_deliver, standby,
           heartbeat_at AS last_heartbeat,
           extract(epoch FROM clock_timestamp() - heartbeat_at)::float8 AS heartbeat_age_s,
           (published_total + coalesce((
               SELECT sum(messages) FROM {schema}.published AS mark WHERE mark.node = name AND position > published_to
           ), 0))::bigint AS published_total,
           {is_alive} AS alive
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

# A row scheduled for next week must not look like one that has waited since last week. A row waits since it was
# written, or since its available_at. The first of each lane stands for its lane, as ids and times of writing run
# together but for transactions that overlap. So a backlog of a million rows costs what one of ten does.
# The rows of a paused lane wait as an operator wants it. A writer may have written an infinite moment. Nothing can be
# subtracted from it: a row that is due since ever waits since it was written.
OLDEST_PENDING = SQL("""
    SELECT extract(epoch FROM now() - least(
        (SELECT min(front.created_at) FILTER (WHERE isfinite(front.created_at))
         FROM generate_series(0, {lanes} - 1) AS lane (number)
         CROSS JOIN LATERAL (
             SELECT row.created_at
             FROM {schema}.message_state AS row
             WHERE row.state = 'pending' AND row.lane = lane.number::smallint AND row.available_at IS NULL
             ORDER BY row.id
             LIMIT 1
         ) AS front
         WHERE lane.number <> ALL (ARRAY(SELECT pause.lane FROM {schema}.lane_pause AS pause))),
        (SELECT min(row.available_at)
         FROM {schema}.message_state AS row
         WHERE row.state = 'pending' AND row.available_at > '-infinity' AND row.available_at <= now()
            AND row.lane <> ALL (ARRAY(SELECT pause.lane FROM {schema}.lane_pause AS pause))),
        (SELECT min(row.created_at)
         FROM {schema}.message_state AS row
         WHERE row.state = 'pending' AND row.available_at = '-infinity' AND isfinite(row.created_at)
            AND row.lane <> ALL (ARRAY(SELECT pause.lane FROM {schema}.lane_pause AS pause)))
    ))::float8
""")

# Refused rows that wait for their next attempt; and of these, those for which it is not overdue.
COUNT_REFUSED = SQL("""
    SELECT count(*), count(*) FILTER (WHERE available_at > now() - {stalled_after} * interval '1 second')
    FROM {schema}.message_state
    WHERE state = 'pending' AND available_at IS NOT NULL AND attempts > 0
""")

# Statistics taken while the table was empty would make the planner read all of it, once a lane.
BY_INDEX = SQL("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A relay as its row in `node` has it."""

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
    alive: bool  # the heartbeat is fresh, and its session is there


class About(StrEnum):
    """What a reason is about, and so where it is repaired."""

    RELAYS = "relays"
    REFUSED = "refused"
    PARKED = "parked"
    ROUTE = "route"
    PAUSE = "pause"
    SESSIONS = "sessions"


class Reason(Guided):
    """Why the state is not `ok`, in words that name the command; JSON has the words alone."""

    __slots__ = ("about",)

    def __new__(cls, words: str, about: About, runbook: Runbook) -> "Reason":
        reason = str.__new__(cls, words)
        reason.about, reason.runbook = about, runbook
        return reason

    about: About


@dataclass(frozen=True, slots=True)
class Status:
    """What `relay status` shows; the field names are the keys of its JSON."""

    state: OutboxState
    reasons: list[Reason]
    pending: int
    in_flight: int
    parked: int
    parked_held: int  # of these, rows that only wait behind another one of their key
    quarantined: int
    quarantined_routes: list[RouteStatus]
    paused_lanes: list[LaneStatus]
    oldest_pending_age_s: float | None
    published_total: int
    nodes: list[NodeStatus]


def read_status(
    tables: Tables, *, progress_timeout: float = 3.0, published_before: Mapping[str, int] | None = None
) -> Status:
    """Read how the outbox is doing.

    When rows have waited for long although a relay is alive, it watches for up to `progress_timeout` seconds whether
    anything goes out. A large backlog being worked off is no stall. Give it three heartbeats, since the counters move
    with them.

    Args:
        published_before: what `published` said of an earlier status, three heartbeats ago; with it, nothing is watched.
    """
    # One snapshot for all figures: a row that is being parked must not be counted twice, or not at all.
    with tables.transaction():
        tables.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        nodes = list_nodes(tables)
        lanes = list_lanes(tables)
        routes = list_routes(tables)
        (published_total,) = tables.one(COUNT_PUBLISHED)
        pending = tables.one(COUNT_PENDING)[0]
        parked, parked_heads = tables.one(COUNT_PARKED)
        by_others = held_up(tables, looked_at=LOOKED_AT)
        tables.connection.execute(BY_INDEX)
        (oldest,) = tables.one(OLDEST_PENDING, lanes=LANES)
        refused, tried_on = tables.one(COUNT_REFUSED, stalled_after=STALLED_AFTER)
    oldest_age = None if oldest is None else max(0.0, float(oldest))
    # No need to watch for progress where no relay can deliver.
    able = any(node.alive and node.can_deliver for node in nodes)
    waits = oldest_age is not None and oldest_age > (STALLED_AFTER if able else STALLED_UNABLE_AFTER)
    # Rows behind a refused one of their key wait with it: that is a fault of the row, and it will be parked.
    worked_on = tried_on > 0 and any(node.alive for node in nodes)
    stalled = waits and not worked_on
    if stalled and able and published_before is not None:
        stalled = not _have_published(nodes, published_before)
    elif stalled and able:
        stalled = not _progresses(tables, nodes, progress_timeout)
    standby, used_up = commits_without_standby(tables.connection), ids_used_up(tables)
    reasons = [Reason(str(standby), About.SESSIONS, Runbook.SESSION)] if standby else []
    if used_up:
        reasons.append(Reason(str(used_up), About.SESSIONS, Runbook.STALLED))
    # These keep a relay from its heartbeats.
    if not (standby and standby.is_relay) and not (used_up and used_up.is_relay):
        reasons += _reasons(nodes, oldest_age if stalled else None)
        free = [each.lane for each in lanes if each.node is None and each.paused_at is None]
        if free and any(node.alive for node in nodes):
            reasons += _lost_lanes(lane_holders(tables, free), free, is_waited_for=pending > 0)
    reasons += _row_reasons(refused, parked_heads, parked - parked_heads)
    reasons += route_reasons(routes)
    reasons += [_writer_reason(each) for each in by_others]
    paused_lanes = [lane for lane in lanes if lane.paused_at is not None]
    reasons += [Reason(_lane_reason(lane), About.PAUSE, Runbook.PAUSED) for lane in paused_lanes]
    in_the_way = [*foreign_locks(tables), *long_holders(tables.connection)]
    reasons += [Reason(str(each), About.SESSIONS, Runbook.SESSION) for each in in_the_way]
    return Status(
        state=OutboxState.STALLED if stalled else OutboxState.DEGRADED if reasons else OutboxState.OK,
        reasons=reasons,
        pending=pending,
        in_flight=sum(node.in_flight for node in nodes if node.alive),
        parked=parked,
        parked_held=parked - parked_heads,
        quarantined=sum(route.rows for route in routes),
        quarantined_routes=routes,
        paused_lanes=paused_lanes,
        oldest_pending_age_s=None if oldest_age is None else round(oldest_age, 3),
        published_total=published_total,  # also by nodes that are gone for more than a day, and not listed any more
        nodes=nodes,
    )


def list_nodes(tables: Tables) -> list[NodeStatus]:
    """Return the relays that have had a heartbeat in the last day."""
    return tables.rows(NodeStatus, READ_NODES, is_alive=is_alive(tables.schema))


def _progresses(tables: Tables, before: Sequence[NodeStatus], timeout: float) -> bool:
    """Return whether a relay that is alive publishes anything within `timeout` seconds."""
    earlier = published(node for node in before if node.alive)
    deadline = time.monotonic() + timeout
    while earlier and time.monotonic() < deadline:
        time.sleep(0.1)
        if _have_published(list_nodes(tables), earlier):
            return True
    return False


def published(nodes: Iterable[NodeStatus]) -> dict[str, int]:
    """Return by name how much each relay has published."""
    return {node.name: node.published_total for node in nodes}


def _have_published(nodes: Sequence[NodeStatus], earlier: Mapping[str, int]) -> bool:
    return any(node.name in earlier and node.published_total != earlier[node.name] for node in nodes)


def _reasons(nodes: Sequence[NodeStatus], stalled_for: float | None) -> list[Reason]:
    alive = [node for node in nodes if node.alive]
    reasons = []
    if not alive:
        reasons.append(Guided("no relay is alive: start `relay run`", Runbook.RELAY_DOWN))
    elif stalled_for is not None:
        words = f"nothing goes out, and the oldest pending row has waited {stalled_for:.0f} s"
        reasons.append(Guided(words, Runbook.STALLED))
    by_reason: dict[str, list[str]] = {}
    for node in alive:
        for reason in node.reasons or ([] if node.state == OutboxState.OK else [f"it is {node.state}"]):
            by_reason.setdefault(reason, []).append(node.name)
    reasons += [Guided(f"{_relays(names)}: {reason}", of_relay(reason)) for reason, names in by_reason.items()]
    # A relay that was stopped has given its lanes up.
    if gone := [node.name for node in nodes if not node.alive and node.lanes and node.heartbeat_age_s < GONE_FOR]:
        verb = "has" if len(gone) == 1 else "have"
        words = f"{_relays(gone)} {verb} ended without handing the lanes over, and others took them: see what ended it"
        reasons.append(Guided(words, Runbook.FEWER_RELAYS))
    return [Reason(each, About.RELAYS, each.runbook) for each in reasons]


def _lost_lanes(holders: Sequence[LaneHolder], free: Sequence[int], *, is_waited_for: bool) -> list[Reason]:
    """Return which lanes no relay has although one is alive, and which session has them instead.

    A lane that no session has is a reason while rows wait: a relay takes it in a moment. So is one that a relay has
    just taken, until its next heartbeat.
    """
    words = [_held_words(each) for each in holders if is_waited_for or not each.is_relay_alive]
    left = sorted({*free}.difference(*(each.lanes for each in holders)))
    if left and is_waited_for:
        words.append(_no_relay(left))
    return [Reason(each, About.RELAYS, Runbook.LANE_LOST) for each in words]


def _held_words(holder: LaneHolder) -> str:
    locks = "has its lock" if len(holder.lanes) == 1 else "has their locks"
    return f"{_no_relay(holder.lanes)}: {holder} {locks}; {holder.remedy}"


def _no_relay(lanes: Sequence[int]) -> str:
    return f"no relay holds {'lane' if len(lanes) == 1 else 'lanes'} {', '.join(map(str, lanes))}"


def _relays(names: Sequence[str]) -> str:
    if len(names) > RELAYS_NAMED:
        return f"{len(names)} relays"
    return f"{'relay' if len(names) == 1 else 'relays'} {', '.join(names)}"


def _row_reasons(refused: int, parked: int, held: int) -> list[Reason]:
    reasons = []
    if refused:
        reasons.append(Reason(f"{refused} refused by the broker, to be tried again", About.REFUSED, Runbook.PARKED))
    if parked:
        behind = f", {held} held behind {'it' if parked == 1 else 'them'}" if held else ""
        words = f"{parked} parked{behind}: see `relay parked list`"
        reasons.append(Reason(words, About.PARKED, Runbook.KEY_STUCK if held else Runbook.PARKED))
    return reasons


def _writer_reason(held: HeldUp) -> Reason:
    is_parked = held.state == "parked"
    command = "relay parked list --held" if is_parked else "relay quarantine list"
    return Reason(f"{held}: see `{command}`", About.PARKED if is_parked else About.ROUTE, Runbook.KEY_STUCK)


def route_reasons(routes: Sequence[RouteStatus]) -> list[Reason]:
    """Return what does not work or is paused, since when, and for how many rows; one reason for many of an exchange."""
    of_exchange: dict[str, list[RouteStatus]] = {}
    for route in routes:
        if route.paused_at is None:
            of_exchange.setdefault(route.exchange, []).append(route)
    together = {exchange: many for exchange, many in of_exchange.items() if len(many) > ROUTES_NAMED}
    others = [route for route in routes if route.paused_at is not None or route.exchange not in together]
    reasons = [Reason(_exchange_reason(many), About.ROUTE, Runbook.ROUTE) for many in together.values()]
    reasons += [
        Reason(_route_reason(route), About.ROUTE, Runbook.ROUTE)
        if route.paused_at is None
        else Reason(_route_reason(route), About.PAUSE, Runbook.PAUSED)
        for route in others[:ROUTES_NAMED]
    ]
    if more := others[ROUTES_NAMED:]:
        are_paused = ", or are paused" if any(route.paused_at for route in more) else ""
        reasons.append(Reason(f"{len(more)} more routes do not work{are_paused}", About.ROUTE, Runbook.ROUTE))
    return reasons


def _exchange_reason(routes: Sequence[RouteStatus]) -> str:
    first, rows = routes[0], sum(route.waiting for route in routes)
    return (
        f"exchange {first.exchange!r}: {len(routes)} routing keys do not work, {rows} rows wait; the first is"
        f" {first.routing_key!r}, since {first.since:{MOMENT}}: {first.reason}; see `relay quarantine list`"
    )


def _route_reason(route: RouteStatus) -> str:
    rows = "1 row waits" if route.waiting == 1 else f"{route.waiting} rows wait"
    if route.paused_at is not None:
        paused = _paused_words(route.paused_by, route.paused_at, route.paused_why)
        return f"{route.address} is {paused}, {rows}; `relay quarantine resume {route.id}` ends that"
    since = f"{route.since:{MOMENT}}"
    return (
        f"{route.address} does not work since {since}, {rows}: {route.reason}; see `relay quarantine show {route.id}`"
    )


def _lane_reason(lane: LaneStatus) -> str:
    paused = _paused_words(lane.paused_by, lane.paused_at, lane.paused_why)
    return f"lane {lane.lane} is {paused}; `relay lanes resume {lane.lane}` ends that"


def _paused_words(by: str | None, at: datetime | None, why: str | None) -> str:
    return f"paused by {by} since {at:{MOMENT}} ({why})"


def lane_ranges(lanes: Iterable[int]) -> str:
    """Write lanes short: 0-7 9."""
    runs: list[list[int]] = []
    for lane in sorted(lanes):
        if runs and lane == runs[-1][-1] + 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


@operation("status", "GET /status", Role.VIEWER)
def status(at: Servers, _: Nothing) -> Status:
    """Return the backlog, the parked rows and the relays."""
    with at.connect(None) as tables:
        return read_status(tables, progress_timeout=3 * at.settings.relay.heartbeat_interval)


@operation("nodes", "GET /nodes", Role.VIEWER)
def nodes(at: Servers, _: Nothing) -> list[NodeStatus]:
    """Return the relays and their lanes."""
    with at.connect(None) as tables:
        return list_nodes(tables)
