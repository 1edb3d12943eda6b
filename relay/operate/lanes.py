"""The lanes, and those that an operator has paused: their rows stay pending, in order, until they are resumed.

A paused lane is a row of `lane_pause`, and no relay takes it. What is in flight when the pause comes is still sent. The
relays are notified, and obey within a second or two.
"""

from dataclasses import dataclass
from datetime import datetime

from psycopg.sql import SQL

from relay.engine.session.session import LANES
from relay.errors import UsageError
from relay.operate.asked import Lane, MaybeReasoned, Nothing, Reasoned
from relay.operate.audit import note
from relay.operate.health import NODE_STALE_AFTER
from relay.operate.operation import Effect, Role, Servers, operation
from relay.operate.routes.quarantine import ring
from relay.servers.postgres.tables import Tables

PAUSE_LANE = SQL("""
    INSERT INTO {schema}.lane_pause (lane, paused_by, paused_why) VALUES (%(lane)s, %(by)s, %(why)s)
    ON CONFLICT (lane) DO NOTHING
""")
RESUME_LANE = SQL("DELETE FROM {schema}.lane_pause WHERE lane = %(lane)s")

READ_LANES = SQL("""
    SELECT lane.number::integer AS lane, pause.paused_at, pause.paused_by, pause.paused_why, (
        SELECT name FROM {schema}.node
        WHERE lane.number = ANY (node.lanes) AND clock_timestamp() - heartbeat_at <= {stale_after} * interval '1 second'
        ORDER BY heartbeat_at DESC
        LIMIT 1
    ) AS node
    FROM generate_series(0, {lanes} - 1) AS lane (number)
    LEFT JOIN {schema}.lane_pause AS pause ON pause.lane = lane.number
    ORDER BY lane.number
""")


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A lane: who carries it, and whether an operator has paused it."""

    lane: int
    node: str | None  # the relay that has it; of a paused lane until it has given the lane up
    paused_at: datetime | None
    paused_by: str | None
    paused_why: str | None


def list_lanes(tables: Tables) -> list[LaneStatus]:
    """Return all lanes, by number."""
    return tables.rows(LaneStatus, READ_LANES, lanes=LANES, stale_after=NODE_STALE_AFTER)


def pause_lane(tables: Tables, lane: int, *, by: str, why: str) -> LaneStatus:
    """Let no relay carry a lane from now on; return the lane.

    Raises:
        UsageError: there is no such lane, or it is paused already.
    """
    with tables.transaction():
        before = _read_lane(tables, lane)
        values = {"lane": lane, "by": by, "why": why}
        if not tables.execute(PAUSE_LANE, values).rowcount:
            raise UsageError(f"lane {lane} is paused already, by {before.paused_by}: {before.paused_why}")
        note(tables, "lanes pause", f"lane {lane}", by=by, why=why)
        ring(tables)
        return _read_lane(tables, lane)


def resume_lane(tables: Tables, lane: int, *, by: str, why: str | None) -> LaneStatus:
    """Let the relays carry a paused lane again; return the lane.

    Raises:
        UsageError: there is no such lane, or it is not paused.
    """
    with tables.transaction():
        _read_lane(tables, lane)
        if not tables.execute(RESUME_LANE, {"lane": lane}).rowcount:
            raise UsageError(f"lane {lane} is not paused")
        note(tables, "lanes resume", f"lane {lane}", by=by, why=why)
        ring(tables)
        return _read_lane(tables, lane)


def _read_lane(tables: Tables, lane: int) -> LaneStatus:
    for each in list_lanes(tables):
        if each.lane == lane:
            return each
    raise UsageError(f"there is no lane {lane}: they are numbered from 0 to {LANES - 1}")


class PauseLane(Reasoned):
    """Which lane no relay carries, and why."""

    lane: Lane


class ResumeLane(MaybeReasoned):
    """Which lane the relays carry again, and why if that is told."""

    lane: Lane


@operation("lanes.list", "GET /lanes", Role.VIEWER)
def list_(at: Servers, _: Nothing) -> list[LaneStatus]:
    """List the lanes, by number."""
    with at.connect(None) as tables:
        return list_lanes(tables)


@operation("lanes.pause", "POST /lanes/{lane}/pause", Role.OPERATOR, Effect.STORED)
def pause(at: Servers, asked: PauseLane) -> LaneStatus:
    """Let no relay carry a lane; its rows stay pending, in order."""
    with at.connect(None) as tables:
        return pause_lane(tables, asked.lane, by=at.by, why=asked.why)


@operation("lanes.resume", "POST /lanes/{lane}/resume", Role.OPERATOR, Effect.STORED)
def resume(at: Servers, asked: ResumeLane) -> LaneStatus:
    """Let the relays carry a paused lane again."""
    with at.connect(None) as tables:
        return resume_lane(tables, asked.lane, by=at.by, why=asked.reason)
