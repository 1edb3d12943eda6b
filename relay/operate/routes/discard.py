"""Discard the rows of a route in quarantine, as a job.

A batch of rows, its notes in the audit and its count are one transaction. It has the lock on the route's row that the
relay takes to let rows out. What only waited behind them goes when the relay tries the route.
"""

import time
from collections.abc import Callable, Sequence
from uuid import UUID

import psycopg
from psycopg.sql import SQL

from relay.errors import OutboxError, PartlyDoneError
from relay.jobs.job import Job, Kind, Order, Source, make_job, read_job, running
from relay.operate.messages.whereabouts import RowId
from relay.operate.routes.quarantine import (
    LOCK_ROUTE,
    PROBE_POLL,
    PROBE_WAIT,
    PROBES_ON_THEIR_WAY,
    RouteStatus,
    composed,
    parameters,
    probe,
)

BATCH = 500  # rows of a transaction

# Also what is on its way as a probe: it comes back, or was sent.
COUNT = SQL("""
    SELECT count(*), coalesce(max(id), 0)
    FROM (SELECT id FROM {schema}.message_state WHERE {chosen} UNION ({probes})) AS row
""")
READ_BATCH = SQL("""
    SELECT id FROM {schema}.message_state
    WHERE {chosen} AND id > %(after)s AND id <= %(until)s
    ORDER BY id
    LIMIT %(batch)s
""")
DISCARD = SQL("""
    WITH discarded AS (
        UPDATE {schema}.message
        SET state = 'discarded', quarantine = NULL, last_error = concat_ws('; ', last_error, %(words)s::text)
        WHERE state = 'quarantined' AND id = ANY (%(rows)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT 'quarantine discard', id::text, %(by)s, %(why)s, %(job)s FROM discarded
""")
LOCK_JOB = SQL("SELECT state, position FROM {schema}.job WHERE id = %(job)s FOR UPDATE")
SAVE = SQL("""
    UPDATE {schema}.job SET done = done + %(done)s, position = %(position)s, state = %(state)s, saved_at = now()
    WHERE id = %(job)s
""")


def order_discard(
    connection: psycopg.Connection,
    schema: str,
    route: RouteStatus,
    rows: Sequence[RowId],
    *,
    by: str,
    why: str,
    by_console: bool = False,
) -> Job:
    """Write down a job over the rows that the route has now, or over those named; `run_discard` does it."""
    found = connection.execute(composed(schema, COUNT), parameters(route.id, rows)).fetchone()
    selected, until = found or (0, 0)
    named = {
        "ids": [each for each in rows if isinstance(each, int)],
        "message_ids": [str(each) for each in rows if isinstance(each, UUID)],
    }
    order = Order(
        kind=Kind.DISCARD,
        source=Source.QUARANTINED,
        filter={"route": route.id, "until": until, **{name: ids for name, ids in named.items() if ids}},
        by=by,
        why=why,
        selected=selected,
        by_console=by_console,
    )
    return make_job(connection, schema, order)


def run_discard(connection: psycopg.Connection, schema: str, job: Job, *, show: Callable[[Job], None]) -> Job:
    """Do the rest of the job, and return it: done, or paused or cancelled meanwhile.

    It is done, too, when the route works by now: its rows are on their way.

    Args:
        show: called after each batch.
    Raises:
        BusyError: another process runs it.
        PartlyDoneError: the database failed after some rows; `relay jobs resume` goes on.
    """
    begun = time.monotonic()
    done = 0
    with running(connection, schema, job):
        try:
            while (rows := _step(connection, schema, job, may_wait=time.monotonic() - begun < PROBE_WAIT)) is not None:
                done += rows
                if rows:
                    show(read_job(connection, schema, job.id))
                else:
                    time.sleep(PROBE_POLL)
        except (psycopg.Error, OutboxError) as error:
            if not done:
                raise
            raise PartlyDoneError(
                f"{done} rows are discarded, the others stay in quarantine: {error}; `relay jobs resume {job.id}` goes"
                " on"
            ) from error
    return read_job(connection, schema, job.id)


def _step(connection: psycopg.Connection, schema: str, job: Job, *, may_wait: bool) -> int | None:
    """Discard a batch and return its size; 0 while a probe of the rows is on its way, None when the job has ended."""
    route = job.filter["route"]
    named = [*job.filter.get("ids", []), *map(UUID, job.filter.get("message_ids", []))]
    values = {**parameters(route, named), "job": job.id, "until": job.filter["until"], "batch": BATCH}
    with connection.transaction():
        state, position = connection.execute(composed(schema, LOCK_JOB), values).fetchone() or ("gone", 0)
        if state != "open":
            return None
        ended = {**values, "done": 0, "position": position, "state": "done"}
        if connection.execute(composed(schema, LOCK_ROUTE), values).rowcount == 0:
            connection.execute(composed(schema, SAVE), ended)
            return None
        if may_wait and connection.execute(composed(schema, PROBES_ON_THEIR_WAY), values).rowcount:
            return 0
        found = connection.execute(composed(schema, READ_BATCH), {**values, "after": position}).fetchall()
        rows = [id_ for (id_,) in found]
        if not rows:
            connection.execute(composed(schema, SAVE), ended)
            # What is left in the route waits for no more than it did: try it now.
            probe(connection, schema, [route])
            return None
        words = f"discarded by {job.done_by}: {job.why}"
        change = {**values, "rows": rows, "words": words, "by": job.done_by, "why": job.why}
        connection.execute(composed(schema, DISCARD), change)
        connection.execute(composed(schema, SAVE), {**values, "done": len(rows), "position": rows[-1], "state": "open"})
    return len(rows)
