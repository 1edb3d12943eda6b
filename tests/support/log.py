"""Rows of the log, made by SQL: the default switched, segments made, rows settled by receipts as a relay does."""

from typing import Any, LiteralString

import psycopg
import pytest

# Runs a test, or a file's tests, over rows of both storages; the fixture `storage` of their folder says which.
over_both_storages = pytest.mark.parametrize("storage", ["days", "log"], indirect=True)

IDS = 4096  # in a segment of the tests, and in a block
TO_THE_LOG = "ALTER TABLE ONLY outbox.message ALTER COLUMN state SET DEFAULT 'written'"
ENSURE = "SELECT outbox.ensure_segments(%s, %s)"
# Every row of the log that no receipt names: as a relay marks, some time ago.
MARK = """
    INSERT INTO outbox.receipt (block, n, node, ids, sent_at)
    SELECT id >> 12, count(*), 'relay-1', array_agg(id ORDER BY id), now() - %s * interval '1 hour'
    FROM (
        SELECT id FROM outbox.message_log AS row
        WHERE id NOT IN (SELECT unnest(ARRAY(SELECT unnest(ids) FROM outbox.receipt))) AND id <= coalesce(%s, id)
    ) AS row GROUP BY 1
"""
# All lanes have passed this id, and seen all that was committed by then.
CHECKPOINT = """
    INSERT INTO outbox.checkpoint (cluster, lanes, lows, seen_to, unseen, position)
    SELECT system_identifier, %s::smallint[], %s::bigint[], pg_snapshot_xmax(seen)::text::bigint,
        ARRAY(SELECT xid::text::bigint FROM pg_snapshot_xip(seen) AS xid), 0
    FROM pg_control_system(), pg_current_snapshot() AS seen
"""
STORED: LiteralString = """
    id, message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type, payload,
    payload_bytes, created_at, available_at, writer, batch_id, trace_context
"""
MOVE: LiteralString = (
    """
    WITH gone AS (
        DELETE FROM outbox.message_sent RETURNING *
    ), named AS (
        INSERT INTO outbox.receipt (block, n, node, ids, sent_at)
        SELECT id >> 12, count(*), 'relay-1', array_agg(id ORDER BY id), sent_at FROM gone GROUP BY id >> 12, sent_at
    )
    INSERT INTO outbox.message ("""
    + STORED
    + ", state) SELECT "
    + STORED
    + ", 'written' FROM gone"
)


def ensure(connection: psycopg.Connection[Any], ahead: int = 2, *, ids: int = IDS, tries: int = 200) -> list[object]:
    """Make segments until there are so many ahead, as a relay does; return the steps."""
    steps: list[object] = []
    while tries:
        try:
            (step,) = connection.execute(ENSURE, [ahead, ids]).fetchone() or (None,)
        except psycopg.errors.LockNotAvailable:
            tries -= 1
            continue
        if step is None:
            break
        steps.append(step)
    return steps


def use_log(connection: psycopg.Connection[Any], *, ids: int = IDS) -> None:
    """Send new rows to the log, whose segments have so many ids."""
    ensure(connection, ids=ids)
    connection.execute(TO_THE_LOG)


def mark(connection: psycopg.Connection[Any], *, hours_ago: float = 48, up_to: int | None = None) -> None:
    """Settle all rows of the log, or those with an id up to this one."""
    connection.execute(MARK, [hours_ago, up_to])


def note_checkpoint(
    connection: psycopg.Connection[Any], low: int | None = None, lanes: list[int] | None = None
) -> None:
    """Note that all rows up to this id are settled, or up to the last id given."""
    if low is None:
        (low,) = connection.execute("SELECT last_value FROM outbox.message_id_seq").fetchone() or (0,)
    wanted = list(range(16)) if lanes is None else lanes
    connection.execute(CHECKPOINT, [wanted, [low] * len(wanted)])


def move_sent(connection: psycopg.Connection[Any]) -> None:
    """Move the rows of all days to the log, and name them in receipts of the same times."""
    connection.execute(MOVE)
