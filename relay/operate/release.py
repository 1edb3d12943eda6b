"""Let parked rows go, as jobs: send them again, give them up, or set them aside; and bring back what was set aside.

An operator who lets a head go lets the rows behind it go, too. But if another parked row of their key stands in front
of them, they wait on behind that one. So the order of a key outlives every choice of an operator.

A batch of rows, its rows of the audit and the progress of its job are one transaction. So a job that is killed and
resumed does each row once, and its counts are exact.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, assert_never

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from relay.errors import OutboxError, PartlyDoneError
from relay.jobs.job import Job, JobKind, job_lock, make_job, read_job
from relay.jobs.stages import UNPACED, Pacing
from relay.operate.parked import EVERYTHING, Selection, composed, scalar
from relay.operate.whereabouts import whereabouts

BATCH_HEADS = 500  # a transaction; a head goes with all that is held behind it, however many
BATCHES_A_SECOND = 5  # at a rate
OUTCOME_POLL = 0.2  # seconds between two looks at the rows of a stage

# Everyone who parks, holds, retries or discards takes this lock first, so that no row is held behind one
# that is just being let go.
TAKE_LOCK = SQL("SELECT pg_advisory_xact_lock(hashtextextended({name}, 0))")
RING = SQL("SELECT pg_notify({name}, '')")


# What becomes of the rows of the keys of `heads`. `remaining` is the first head of the key that stays parked;
# a row is free when what it waited behind goes. One pass over the key's rows: held rows may be many.
FATES = SQL("""
    SELECT id, remaining, remaining IS NULL OR id < remaining AS goes
    FROM (
        SELECT row.id, row.held_behind, {is_head} AS is_head,
               min(row.id) FILTER (WHERE {is_head} AND row.id <> ALL (%(heads)s::bigint[]))
                   OVER (PARTITION BY row.aggregate_type, row.aggregate_id) AS remaining
        FROM {schema}.message_state AS row
        JOIN (SELECT DISTINCT aggregate_type, aggregate_id
              FROM {schema}.message_state
              WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])) AS key
            ON row.aggregate_type = key.aggregate_type AND row.aggregate_id = key.aggregate_id
        WHERE row.state = 'parked'
    ) AS held
    WHERE NOT is_head
      AND (remaining IS NULL OR held_behind < remaining OR held_behind = ANY (%(heads)s::bigint[]))
""")


@dataclass(frozen=True, slots=True)
class Done:
    """What a job with parked rows did in all its runs, or would do."""

    chosen: int  # rows that were changed, each a head of its key
    released: int  # rows let go behind them
    not_found: list[str]  # what was named and is no such row, with the reason
    job: Job | None = field(default=None, compare=False)  # None: a preview


READ_HEADS = SQL("""
    SELECT row.id FROM {schema}.message_state AS row
    WHERE {matches} AND {is_head} AND row.id > %(after)s
      AND coalesce(row.parked_at, row.created_at) <= %(until)s::timestamptz
    ORDER BY row.id
    LIMIT %(batch)s
""")
COUNT_RELEASED = SQL("SELECT count(*) FROM ({fates}) AS fate WHERE goes")
NOW = SQL("SELECT clock_timestamp()")


def preview(connection: psycopg.Connection, schema: str, selection: Selection, kind: JobKind = JobKind.RETRY) -> Done:
    """Return exactly what a job would do now; changes nothing."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        parameters = {**asdict(selection), "after": 0, "until": scalar(connection, NOW), "batch": selection.limit}
        statement = composed(schema, READ_HEADS, selection, state=_state_of(kind))
        heads = [row[0] for row in connection.execute(statement, parameters)]
        released = 0
        if kind is not JobKind.RESTORE:
            released = scalar(connection, _with_fates(schema, COUNT_RELEASED), {"heads": heads})
        return Done(len(heads), released, _not_found(connection, schema, selection, kind))


COUNT_SELECTED = SQL("""
    UPDATE {schema}.job SET selected = least(%(limit)s::bigint, (
        SELECT count(*) FROM {schema}.message_state AS row
        WHERE {matches} AND {is_head} AND coalesce(row.parked_at, row.created_at) <= made_at
    ))
    WHERE job.id = %(made)s
""")


def make_release(
    connection: psycopg.Connection,
    schema: str,
    kind: JobKind,
    selection: Selection,
    *,
    by: str | None = None,
    why: str | None = None,
    pacing: Pacing = UNPACED,
) -> Job:
    """Write a job with parked rows down, with the count of what it selects, and return it; `run_release` runs it."""
    with connection.transaction():
        job = make_job(connection, schema, kind, selection.as_json(), by=by, why=why, pacing=pacing)
        statement = composed(schema, COUNT_SELECTED, selection, state=_state_of(kind))
        connection.execute(statement, {**asdict(selection), "made": job.id})
    return read_job(connection, schema, job.id)


def run_release(
    connection: psycopg.Connection,
    schema: str,
    job: Job,
    *,
    stopping: threading.Event | None = None,
    show: Callable[[Job], None] = lambda _: None,
) -> Done:
    """Do the rest of a job, batch by batch, and return what it did in all its runs.

    Returns before the end when `stopping` is set, when an operator has paused or cancelled the job, and when too many
    rows of a stage came back: `Done.job` tells the state. Rows parked after the job was made are left alone, so it ends
    also when a relay parks them again at once.

    Args:
        show: called after each batch.
    Raises:
        BusyError: another process runs it.
        PartlyDoneError: the database failed after some batches; these stay done.
    """
    selection = Selection.from_json(job.filter)
    with job_lock(connection, schema, job):
        before = read_job(connection, schema, job.id)  # another process may have run it since
        not_found = _not_found(connection, schema, selection, job.kind) if before.position == 0 else []
        run = _Run(connection, schema, before, selection=selection, stopping=stopping or threading.Event())
        try:
            while run.step():
                show(run.job)
        except (psycopg.Error, OutboxError) as error:
            if run.job.done == before.done:
                raise
            raise PartlyDoneError(
                f"{run.job.done} rows are done, the others stay {_state_of(job.kind)}: {error};"
                f" `relay jobs resume {job.id}` goes on"
            ) from error
    ended = read_job(connection, schema, job.id)
    return Done(ended.done, ended.released, not_found, ended)


def retry(
    connection: psycopg.Connection, schema: str, selection: Selection, *, by: str | None = None, why: str | None = None
) -> Done:
    """Make the selected heads and what is held behind them pending again, with all their attempts; as `run_release`."""
    return run_release(connection, schema, make_release(connection, schema, JobKind.RETRY, selection, by=by, why=why))


def discard(connection: psycopg.Connection, schema: str, selection: Selection, *, by: str, why: str) -> Done:
    """Discard the selected heads and release what is held behind them; as `run_release`.

    The rows are kept as `discarded`. Who did so and why is added to the reason of each row.
    """
    return run_release(connection, schema, make_release(connection, schema, JobKind.DISCARD, selection, by=by, why=why))


# Each notes for each row who changed it, and why.
CHANGE_HEADS = SQL("""
    WITH changed AS (
        UPDATE {schema}.message SET {change} WHERE state = {state} AND id = ANY (%(heads)s::bigint[]) RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT {command}, id::text, %(by)s, %(why)s, %(job)s FROM changed ORDER BY id
""")
PENDING = SQL("""state = 'pending', attempts = 0, available_at = now(), held_behind = NULL, last_error = NULL,
    parked_at = NULL""")
DISCARDED = SQL("""state = 'discarded', held_behind = NULL,
    last_error = concat_ws('; ', last_error, concat('discarded by ', %(by)s::text, ': ', %(why)s::text))""")
ARCHIVED = SQL("state = 'archived', held_behind = NULL")
PARKED = SQL("state = 'parked'")

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
    SET {change}
    FROM fate
    WHERE row.state = 'parked' AND row.id = fate.id AND fate.goes
""")
MAY_GO_ON = SQL("SELECT state = 'open' AND paused_at IS NULL FROM {schema}.job WHERE id = %(job)s FOR UPDATE")
SAVE = SQL("""
    UPDATE {schema}.job
    SET done = done + %(heads)s, released = released + %(released)s, position = %(position)s, saved_at = now()
    WHERE id = %(job)s
""")
END = SQL("UPDATE {schema}.job SET state = 'done', saved_at = now() WHERE id = %(job)s AND state = 'open'")

# By lane as well: the pending rows have no index by id alone.
STAGE_ROWS = SQL("""
    SELECT target::bigint FROM {schema}.operator_audit
    WHERE job = %(job)s AND command = 'parked retry' ORDER BY id OFFSET %(first)s LIMIT %(rows)s
""")
COUNT_PENDING = SQL("""
    SELECT count(*) FROM {schema}.message_state
    WHERE state = 'pending' AND lane = ANY (ARRAY(SELECT generate_series(0, 15))::smallint[])
        AND id = ANY (%(ids)s::bigint[])
""")
COUNT_BACK = SQL("""
    SELECT count(*) FROM {schema}.message_state
    WHERE state IN ('parked', 'quarantined') AND id = ANY (%(ids)s::bigint[])
""")
JUDGE = SQL("""
    UPDATE {schema}.job
    SET stage = stage + 1, failed = failed + %(failed)s, saved_at = now(),
        paused_at = CASE WHEN %(words)s::text IS NOT NULL THEN now() END, paused_why = %(words)s
    WHERE id = %(job)s AND state = 'open' AND paused_at IS NULL
""")


class _Run:
    """One run of a job, step by step."""

    def __init__(
        self, connection: psycopg.Connection, schema: str, job: Job, *, selection: Selection, stopping: threading.Event
    ) -> None:
        self.job = job  # with the progress of the last step
        self._connection = connection
        self._schema = schema
        self._selection = selection
        self._stopping = stopping
        self._state = _state_of(job.kind)
        self._change = _change_of(job.kind)
        self._free_at = time.monotonic()  # when the rate allows the next rows

    def step(self) -> bool:
        """Do a batch, or look at the rows of a stage; False: the run is over."""
        if self._stopping.is_set():
            return False
        end = self.job.pacing.end_of(self.job.stage)
        if end is not None and self.job.done >= end:
            return self._judge(end)
        batch = self._batch(end)
        return self._do_batch(batch) if batch > 0 else self._end()

    def _batch(self, end: int | None) -> int:
        limits = [BATCH_HEADS]
        if end is not None:
            limits.append(end - self.job.done)
        if self._selection.limit is not None:
            limits.append(self._selection.limit - self.job.done)
        if self.job.rate is not None:
            limits.append(max(1, int(self.job.rate / BATCHES_A_SECOND)))
        return min(limits)

    def _do_batch(self, batch: int) -> bool:
        if self.job.rate is not None and self._stopping.wait(max(0.0, self._free_at - time.monotonic())):
            return False
        with self._connection.transaction():
            if not self._may_go_on():
                return False
            self._connection.execute(TAKE_LOCK.format(name=f"{self._schema}.park"))
            heads = self._heads(batch)
            if heads:
                released = self._let_go(heads)
                values = {"heads": len(heads), "released": released, "position": heads[-1], "job": self.job.id}
                self._connection.execute(self._sql(SAVE), values)
        if not heads:
            return self._end()
        if self.job.rate is not None:
            self._free_at = max(self._free_at, time.monotonic() - 1) + len(heads) / self.job.rate
        self.job = replace(
            self.job, done=self.job.done + len(heads), released=self.job.released + released, position=heads[-1]
        )
        return True

    def _heads(self, batch: int) -> list[int]:
        statement = composed(self._schema, READ_HEADS, self._selection, state=self._state)
        values = {"after": self.job.position, "until": self.job.made_at, "batch": batch}
        return [row[0] for row in self._connection.execute(statement, asdict(self._selection) | values)]

    def _let_go(self, heads: list[int]) -> int:
        """Change the heads, and release the rows behind them; return how many these are."""
        values = {"heads": heads, "by": self.job.made_by, "why": self.job.why, "job": self.job.id}
        released = 0
        if self.job.kind is not JobKind.RESTORE:
            self._connection.execute(_with_fates(self._schema, HOLD_BEHIND_REMAINING), {"heads": heads})
            statement = _with_fates(self._schema, RELEASE, change=Composed([PENDING]))
            released = self._connection.execute(statement, {"heads": heads}).rowcount
        command = f"parked {self.job.kind}"
        self._connection.execute(
            self._sql(CHANGE_HEADS, change=self._change, state=self._state, command=command), values
        )
        self._connection.execute(RING.format(name=f"{self._schema}.doorbell"))
        return released

    def _judge(self, end: int) -> bool:
        """Wait for the outcome of a stage's rows, and pause the job if too many came back."""
        rows = self.job.stages[self.job.stage]
        values = {"job": self.job.id, "first": end - rows, "rows": rows}
        ids = [row[0] for row in self._connection.execute(self._sql(STAGE_ROWS), values)]
        if scalar(self._connection, self._sql(COUNT_PENDING), {"ids": ids}):
            self._stopping.wait(OUTCOME_POLL)
            return bool(self._may_go_on())
        failed = scalar(self._connection, self._sql(COUNT_BACK), {"ids": ids})
        words = None
        if self.job.pacing.is_failing(failed, rows):
            words = f"stage {self.job.stage + 1}: {failed} of {rows} rows came back"
        changed = self._connection.execute(
            self._sql(JUDGE), {"job": self.job.id, "failed": failed, "words": words}
        ).rowcount
        self.job = replace(self.job, stage=self.job.stage + 1, failed=self.job.failed + failed)
        return bool(changed) and words is None

    def _may_go_on(self) -> bool:
        return scalar(self._connection, self._sql(MAY_GO_ON), {"job": self.job.id}) is True

    def _end(self) -> bool:
        self._connection.execute(self._sql(END), {"job": self.job.id})
        return False

    def _sql(self, statement: SQL, **parts: Any) -> Composed:
        return statement.format(schema=Identifier(self._schema), **parts)


def _state_of(kind: JobKind) -> str:
    """Return the state of the rows that a job takes."""
    return "archived" if kind is JobKind.RESTORE else "parked"


def _change_of(kind: JobKind) -> SQL:
    match kind:
        case JobKind.RETRY:
            return PENDING
        case JobKind.DISCARD:
            return DISCARDED
        case JobKind.ARCHIVE:
            return ARCHIVED
        case JobKind.RESTORE:
            return PARKED
        case JobKind.REPLAY:
            raise AssertionError("a replay has no parked rows: relay/replay/run.py runs it")
        case _:
            assert_never(kind)


READ_NOT_FOUND = SQL("""
    SELECT given.id, given.message_id, row.held_behind
    FROM unnest(%(ids)s::bigint[], %(message_ids)s::uuid[]) AS given (id, message_id)
    LEFT JOIN {schema}.message_state AS row
        ON row.state = {of_state} AND (row.id = given.id OR row.message_id = given.message_id)
    WHERE row.id IS NULL OR NOT {is_head}
""")


def _not_found(connection: psycopg.Connection, schema: str, selection: Selection, kind: JobKind) -> list[str]:
    if not selection.ids and not selection.message_ids:
        return []
    state = _state_of(kind)
    named = {"ids": selection.ids or [], "message_ids": selection.message_ids or []}
    statement = composed(schema, READ_NOT_FOUND, of_state=SQL("{}").format(state))
    rows = connection.execute(statement, named).fetchall()
    lacking = {id_ or message_id: behind for id_, message_id, behind in rows}
    elsewhere = whereabouts(connection, schema, [each for each, behind in lacking.items() if behind is None])
    return [
        f"{each} is held behind {behind}: choose that one" if behind else f"{each} is not {state}: {elsewhere[each]}"
        for each, behind in lacking.items()
    ]


def _with_fates(schema: str, statement: SQL, **parts: Composed) -> Composed:
    return composed(schema, statement, EVERYTHING, state="parked", fates=composed(schema, FATES), **parts)
