"""Let parked rows go: send them again, or set them aside as archived or discarded; and park again what was set aside.

Each is a job. A batch of rows, its notes in the audit and its count are one transaction. So a job that is killed
at any moment goes on where it was: its counts are exact, and it does each row once.

An operator who retries, discards or archives a head lets the rows behind it go. But if another parked row of their key
stands in front of them, they wait on behind that one. So the order of a key outlives every choice of an operator.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from psycopg.sql import SQL, Composed

from relay.config.settings import DatabaseSettings
from relay.errors import UsageError
from relay.jobs.job import NO_CAUTION, Caution, Job, JobState, Kind, Order, Source, make_job, operator
from relay.jobs.work import FULL, Did, Ended, Pace, Save, StageOutcome, Step, Waits, Watched, stage_of
from relay.operate.health import NODE_STALE_AFTER
from relay.operate.messages.whereabouts import whereabouts
from relay.operate.parked.read import ParkedSelection, composed
from relay.operate.session import SessionWork
from relay.servers.postgres.database import one
from relay.servers.postgres.tables import Tables

BATCH_HEADS = 500  # a transaction; a head goes with all that is held behind it, however many
OUTCOME_POLL = 0.2  # seconds between two looks at the rows of a stage
MOST_WATCHED = 50_000  # rows that a job looks at behind its stages: each is a row of job_row
GRAIN = 0.2  # seconds' worth of rows that a transaction waits for, at a rate

# Everyone who parks, holds, retries or discards takes this lock first, so that no row is held behind one
# that is just being let go.
TAKE_LOCK = SQL("SELECT pg_advisory_xact_lock(hashtextextended({name}, 0))")
RING = SQL("SELECT pg_notify({name}, '')")


# What becomes of the rows of the keys of `heads`. `remaining` is the first head of the row's key and role that stays
# parked; a row is free when what it waited behind goes. One pass over the key's rows: held rows may be many.
# Only the relay knows `key_scope`: if a head of another role holds the key, it parks a freed row behind that head.
FATES = SQL("""
    SELECT id, remaining, remaining IS NULL OR id < remaining AS goes
    FROM (
        SELECT row.id, row.held_behind, {is_head} AS is_head,
               min(row.id) FILTER (WHERE {is_head} AND row.id <> ALL (%(heads)s::bigint[]))
                   OVER (PARTITION BY row.aggregate_type, row.aggregate_id, row.written_as) AS remaining
        FROM {schema}.message_state AS row
        JOIN (SELECT DISTINCT aggregate_type, aggregate_id
              FROM {schema}.message_state
              WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])) AS key
            ON row.aggregate_type = key.aggregate_type AND row.aggregate_id = key.aggregate_id
        WHERE row.state = 'parked'
    ) AS held
    WHERE NOT is_head
      AND (held_behind = ANY (%(heads)s::bigint[]) OR (remaining IS NULL OR held_behind < remaining) AND NOT EXISTS (
          SELECT FROM {schema}.message_state AS other
          WHERE other.state = 'parked' AND other.id = held.held_behind AND other.held_behind IS NULL
      ))
""")


@dataclass(frozen=True, slots=True)
class ParkedDone:
    """What a job over rows did, or would do."""

    chosen: int  # heads retried, discarded, archived or restored
    released: int  # rows let go behind them
    not_found: list[str]  # what was named and is no such row, with the reason
    job: int | None = field(default=None, compare=False)  # None: a preview
    state: JobState = field(default=JobState.DONE, compare=False)  # of the job
    failed: int = field(default=0, compare=False)  # rows that failed again while it watched
    waiting: int | None = field(default=None, compare=False)  # rows that had not gone out; None: not watched
    keys: int | None = field(default=None, compare=False)  # that the chosen rows have; None: they were not counted


READ_HEADS = SQL("""
    SELECT row.id FROM {schema}.message_state AS row
    WHERE {matches} AND {is_head} AND row.id > %(after)s
      AND coalesce(row.parked_at, row.created_at) <= %(until)s::timestamptz
    ORDER BY row.id
    LIMIT %(batch)s
""")
COUNT_HEADS = SQL("SELECT count(*) FROM ({heads}) AS head")
COUNT_KEYS = SQL("""
    SELECT count(DISTINCT (aggregate_type, aggregate_id)) FROM {schema}.message_state
    WHERE state = %(state)s AND id = ANY (%(heads)s::bigint[]) AND aggregate_id IS NOT NULL
""")
COUNT_RELEASED = SQL("SELECT count(*) FROM ({fates}) AS fate WHERE goes")
NOW = SQL("SELECT clock_timestamp()")


def preview(tables: Tables, kind: Kind, selection: ParkedSelection, *, aside: Source | None = None) -> ParkedDone:
    """Return exactly what a job of this kind would do now; changes nothing.

    Args:
        aside: what a restore takes: archived or discarded rows.
    """
    state, released = str(_source(kind, aside)), 0
    with tables.transaction():
        tables.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        parameters = _all_heads(tables, selection)
        heads = [row[0] for row in tables.execute(_heads(tables.schema, state, selection), parameters)]
        if kind is not Kind.RESTORE:
            (released,) = tables.one(_with_fates(tables.schema, COUNT_RELEASED), {"heads": heads})
        (keys,) = tables.one(COUNT_KEYS, {"heads": heads, "state": state})
        return ParkedDone(len(heads), released, rows_not_found(tables, kind, selection, aside=aside), keys=keys)


def order_rows(
    tables: Tables,
    kind: Kind,
    selection: ParkedSelection,
    *,
    by: str | None = None,
    why: str | None = None,
    caution: Caution = NO_CAUTION,
    by_console: bool = False,
    aside: Source | None = None,
) -> Job:
    """Write down a job over the rows that are there now; `ParkedWork` does it.

    Args:
        aside: what a restore takes: archived or discarded rows.

    Raises:
        UsageError: rows of this kind of job have no outcome that a stage could wait for.
    """
    if caution.stages and kind is not Kind.RETRY:
        raise UsageError(f"--stages waits for the outcome of rows; a {kind} has no outcome")
    source, selected = _source(kind, aside), None
    if selection.job is None:  # else each row set aside has its notes read, and the work counts them
        heads = _heads(tables.schema, str(source), selection)
        (selected,) = tables.one(COUNT_HEADS, _all_heads(tables, selection), heads=heads)
    order = Order(
        kind=kind,
        source=source,
        filter=selection.as_json(),
        by=operator(by),
        why=why,
        selected=selected,
        caution=caution,
        by_console=by_console,
    )
    return make_job(tables, order)


RETRY_HEADS = SQL("""
    WITH retried AS (
        UPDATE {schema}.message
        SET state = 'pending', attempts = 0, available_at = now(), held_behind = NULL, last_error = NULL,
            parked_at = NULL
        WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT 'parked retry', id::text, %(by)s, %(why)s, %(job)s FROM retried
""")
COUNT_RETRIED = SQL("""
    UPDATE {schema}.failure SET retried = retried + counted.rows
    FROM (
        SELECT failure, count(*) AS rows FROM {schema}.parked_failure WHERE id = ANY (%(heads)s::bigint[])
        GROUP BY failure
    ) AS counted
    WHERE failure.id = counted.failure
""")
DISCARD_HEADS = SQL("""
    WITH discarded AS (
        UPDATE {schema}.message
        SET state = 'discarded', held_behind = NULL
        WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT 'parked discard', id::text, %(by)s, %(why)s, %(job)s FROM discarded
""")
ARCHIVE_HEADS = SQL("""
    WITH archived AS (
        UPDATE {schema}.message SET state = 'archived', held_behind = NULL
        WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT 'parked archive', id::text, %(by)s, %(why)s, %(job)s FROM archived
""")
RESTORE_HEADS = SQL("""
    WITH restored AS (
        UPDATE {schema}.message
        SET state = 'parked', held_behind = NULL, parked_at = coalesce(parked_at, now())
        WHERE state = %(state)s AND id = ANY (%(heads)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT 'parked restore', id::text, %(by)s, %(why)s, %(job)s FROM restored
""")
CHANGES = {
    Kind.RETRY: RETRY_HEADS,
    Kind.DISCARD: DISCARD_HEADS,
    Kind.ARCHIVE: ARCHIVE_HEADS,
    Kind.RESTORE: RESTORE_HEADS,
}

HOLD_BEHIND_REMAINING = SQL("""
    WITH fate AS MATERIALIZED ({fates})
    UPDATE {schema}.message AS row
    SET held_behind = fate.remaining, last_error = 'waits behind message ' || fate.remaining
    FROM fate
    WHERE row.state = 'parked' AND row.id = fate.id AND NOT fate.goes
""")
RELEASE = SQL("""
    WITH fate AS MATERIALIZED ({fates})
    UPDATE {schema}.message AS row
    SET state = 'pending', attempts = 0, available_at = now(), held_behind = NULL, last_error = NULL, parked_at = NULL
    FROM fate
    WHERE row.state = 'parked' AND row.id = fate.id AND fate.goes
""")

NOTE = SQL("""
    INSERT INTO {schema}.job_row (job_id, id, lane)
    SELECT %(job)s, id, lane FROM {schema}.message_state WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])
""")
# A row that is neither pending nor parked again was sent.
OUTCOME = SQL("""
    SELECT count(*), count(*) FILTER (WHERE is_pending), count(*) FILTER (WHERE is_failing)
    FROM (
        SELECT EXISTS (
            SELECT FROM {schema}.message_state AS row
            WHERE row.state = 'pending' AND row.lane = noted.lane AND row.id = noted.id
        ) AS is_pending, EXISTS (
            SELECT FROM {schema}.message_state AS row
            WHERE row.state IN ('parked', 'quarantined') AND row.id = noted.id
        ) AS is_failing
        FROM {schema}.job_row AS noted WHERE noted.job_id = %(job)s
    ) AS outcome
""")
END_STAGE = SQL("""
    WITH failing AS (
        INSERT INTO {schema}.job_failure (job_id, id, message_id, reason)
        SELECT %(job)s, row.id, row.message_id, coalesce(row.last_error, 'it waits in quarantine')
        FROM {schema}.message_state AS row JOIN {schema}.job_row AS noted ON noted.id = row.id
        WHERE noted.job_id = %(job)s AND row.state IN ('parked', 'quarantined')
        ON CONFLICT DO NOTHING
    )
    DELETE FROM {schema}.job_row WHERE job_id = %(job)s
""")


# A row in quarantine has not failed: it goes out when its route works.
SETTLE = SQL("""
    WITH settled AS (
        DELETE FROM {schema}.job_row AS noted
        WHERE job_id = %(job)s AND NOT EXISTS (
            SELECT FROM {schema}.message_state AS row
            WHERE row.state = 'pending' AND row.lane = noted.lane AND row.id = noted.id
        ) AND NOT EXISTS (
            SELECT FROM {schema}.message_state AS row WHERE row.state = 'quarantined' AND row.id = noted.id
        )
        RETURNING id
    ), failing AS (
        SELECT row.id, row.message_id, coalesce(row.last_error, 'it has no reason') AS reason
        FROM {schema}.message_state AS row JOIN settled ON settled.id = row.id
        WHERE row.state = 'parked'
    ), noted AS (
        INSERT INTO {schema}.job_failure (job_id, id, message_id, reason)
        SELECT %(job)s, id, message_id, reason FROM failing
        ON CONFLICT DO NOTHING
    )
    SELECT (SELECT count(*) FROM failing),
        (SELECT count(*) FROM {schema}.job_row WHERE job_id = %(job)s) - (SELECT count(*) FROM settled)
""")
LEAVE_REST = SQL("DELETE FROM {schema}.job_row WHERE job_id = %(job)s")
IS_ANY_ALIVE = SQL("""
    SELECT EXISTS (
        SELECT FROM {schema}.node WHERE clock_timestamp() - heartbeat_at <= %(stale_after)s * interval '1 second'
    )
""")


class ParkedWork(SessionWork):
    """A job over parked, archived or discarded rows; see `relay.jobs.work.Work`."""

    most = BATCH_HEADS

    def __init__(self, database: DatabaseSettings, job: Job) -> None:
        super().__init__(database)
        self.pace = Pace(job.rate or FULL, grain=GRAIN)
        self.left = f"the others stay {job.source}"
        self._selection = ParkedSelection.from_json(job.filter)

    async def step(self, room: int, save: Save) -> Step:
        job, connection = save.job, self._connection
        async with connection.transaction():
            if job.kind is not Kind.RESTORE:
                await connection.execute(TAKE_LOCK.format(name=f"{self._schema}.park"))
            await save.check(connection)
            heads = await self._read_heads(job, room)
            if not heads:
                return Ended()
            watched = await self._note(job, heads)
            released = await self._change(job, heads)
            did = Did(done=len(heads), released=released, position=heads[-1], watched=watched)
            await save(connection, did)
            if job.kind is not Kind.RESTORE:
                await connection.execute(RING.format(name=f"{self._schema}.doorbell"))
        return did

    async def outcome(self, save: Save) -> StageOutcome | Waits:
        job, connection = {"job": save.job.id}, self._connection
        async with connection.transaction():
            await save.check(connection)
            found = await (await connection.execute(self._sql(OUTCOME), job)).fetchone()
            rows, pending, failing = one(found)
            if pending:
                return Waits(OUTCOME_POLL)
            words = f"{failing} of {rows} rows of the stage failed again: {failing / max(rows, 1):.0%}"
            outcome = StageOutcome(rows=rows, failing=failing, failed=failing, words=words)
            await connection.execute(self._sql(END_STAGE), job)
            await save(connection, outcome)
        return outcome

    async def watch(self, save: Save, *, is_last: bool) -> Watched | None:
        if save.job.kind is not Kind.RETRY:
            return None
        job, connection = {"job": save.job.id}, self._connection
        async with connection.transaction():
            await save.check(connection)
            found = await connection.execute(self._sql(IS_ANY_ALIVE), {"stale_after": NODE_STALE_AFTER})
            is_last |= one(await found.fetchone()) == (False,)  # nothing would go out
            failed, waiting = one(await (await connection.execute(self._sql(SETTLE), job)).fetchone())
            seen = Watched(failed=failed, waiting=waiting, is_last=is_last)
            if is_last:
                await connection.execute(self._sql(LEAVE_REST), job)
            await save(connection, seen)
        return seen

    async def _read_heads(self, job: Job, room: int) -> list[int]:
        limit = self._selection.limit
        batch = room if limit is None else min(room, limit - job.done)
        if batch <= 0:
            return []
        parameters = {**asdict(self._selection), "after": job.position, "until": job.made_at, "batch": batch}
        found = await self._connection.execute(_heads(self._schema, str(job.source), self._selection), parameters)
        return [id_ for (id_,) in await found.fetchall()]

    async def _note(self, job: Job, heads: list[int]) -> int:
        """Note which rows are watched, and return how many."""
        is_watched = stage_of(job) is not None or (job.kind is Kind.RETRY and (job.watched or 0) < MOST_WATCHED)
        if not is_watched:
            return 0
        return (await self._connection.execute(self._sql(NOTE), {"heads": heads, "job": job.id})).rowcount

    async def _change(self, job: Job, heads: list[int]) -> int:
        """Change the heads, and return how many rows go from behind them."""
        connection = self._connection
        values = {"heads": heads, "by": job.done_by, "why": job.why, "job": job.id, "state": str(job.source)}
        released = 0
        if job.kind is not Kind.RESTORE:
            await connection.execute(_with_fates(self._schema, HOLD_BEHIND_REMAINING), values)
            released = (await connection.execute(_with_fates(self._schema, RELEASE), values)).rowcount
        if job.kind is Kind.RETRY:
            await connection.execute(self._sql(COUNT_RETRIED), values)
        await connection.execute(self._sql(CHANGES[job.kind]), values)
        return released


READ_NOT_FOUND = SQL("""
    SELECT given.id, given.message_id, row.held_behind
    FROM unnest(%(ids)s::bigint[], %(message_ids)s::uuid[]) AS given (id, message_id)
    LEFT JOIN {schema}.message_state AS row
        ON row.state = %(state)s AND (row.id = given.id OR row.message_id = given.message_id)
    WHERE row.id IS NULL OR NOT {is_head}
""")


def rows_not_found(tables: Tables, kind: Kind, selection: ParkedSelection, *, aside: Source | None = None) -> list[str]:
    """Return what was named and is no row that a job of this kind could change, with the reason."""
    state = str(_source(kind, aside))
    named = {"ids": selection.ids or [], "message_ids": selection.message_ids or [], "state": state}
    rows = tables.execute(composed(tables.schema, READ_NOT_FOUND), named).fetchall()
    lacking = {id_ or message_id: behind for id_, message_id, behind in rows}
    elsewhere = whereabouts(tables, [each for each, behind in lacking.items() if behind is None])
    return [
        f"{each} is held behind {behind}: choose that one" if behind else f"{each} is not {state}: {elsewhere[each]}"
        for each, behind in lacking.items()
    ]


def _source(kind: Kind, aside: Source | None) -> Source:
    """Return what a job of this kind selects from; sources of rows have the names of their states."""
    return aside or Source.ARCHIVED if kind is Kind.RESTORE else Source.PARKED


def _all_heads(tables: Tables, selection: ParkedSelection) -> dict[str, Any]:
    """Return the parameters of `_heads` that read all that a selection has now."""
    (until,) = tables.one(NOW)
    return {**asdict(selection), "after": 0, "until": until, "batch": selection.limit}


def _heads(schema: str, state: str, selection: ParkedSelection) -> Composed:
    """Return the statement that reads the next rows of a job."""
    return composed(schema, READ_HEADS, state, selection)


def _with_fates(schema: str, statement: SQL) -> Composed:
    return composed(schema, statement, fates=composed(schema, FATES))
