"""What a kind of bulk work has to bring; the runner brings the rest (relay/jobs/runner.py).

A work is one file. It changes rows or messages, a step at a time, and says what came of a stage. It gets stages, pace,
pause, cancel, progress, and the way back after a kill from the runner.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import psycopg
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.errors import BusyError, JobTurnedError, PartlyDoneError
from relay.jobs.job import BEGIN, LEAVE_LOCK, TAKE_LOCK, Job, JobState, lock_name, read_running
from relay.servers.postgres.database import one

FULL = float("inf")
SLICE = 0.01  # seconds' worth of rows that may go at once
NAP = 0.05  # longest sleep at a time, so that a stop is noticed

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a job, after which it waits for the outcome.

    Attributes:
        begin, end: behind how many rows of the job.
    """

    begin: int
    end: int


def stage_of(job: Job) -> Stage | None:
    """Return the stage that a job is in; None: behind the last one, or there are no stages."""
    ends = job.stages or []
    if job.stage >= len(ends):
        return None
    return Stage(ends[job.stage - 1] if job.stage else 0, ends[job.stage])


@dataclass(frozen=True, slots=True, kw_only=True)
class Did:
    """What a step has done.

    Attributes:
        done, failed, released: as of `Job`, of this step alone.
        refused: what was tried and is left as it was; a later run tries it again.
        position: behind which the next step begins.
        selected: rows that the job has in all; None: as before.
        watched: of `done`, rows that `Work.watch` looks at.
        scanned, to_scan: as of `Job`; None: as before.
    """

    done: int = 0
    failed: int = 0
    released: int = 0
    refused: int = 0
    position: int
    selected: int | None = None
    watched: int = 0
    scanned: int | None = None
    to_scan: int | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """There is nothing to do for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing is left to do.

    Attributes:
        failed: what stays as it was, and is counted as failed.
    """

    failed: int = 0


@dataclass(frozen=True, slots=True)
class Stuck:
    """It cannot go on without an operator."""

    because: str


Step = Did | Waits | Ended | Stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """What came of a stage.

    Attributes:
        rows: that were tried in it.
        failing: of these.
        failed: of these, rows that the job does not yet count as failed.
        words: for an operator, such as "2 of 4 rows of the stage failed".
        position: as of `Did`; None: as it was.
    """

    rows: int
    failing: int
    failed: int
    words: str
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What has become of rows since the last look.

    Attributes:
        failed: rows that failed again since.
        waiting: rows that have not gone out.
        is_last: what waits is not looked at any more.
    """

    failed: int
    waiting: int
    is_last: bool

    @property
    def is_over(self) -> bool:
        return self.is_last or not self.waiting


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that failed for good, or failed again."""

    id: int
    message_id: str
    reason: str


def why_paused(job: Job, rows: int, failing: int, words: str) -> str | None:
    """Return why a job pauses behind a stage; None: it goes on.

    Args:
        words: what came of the stage.
    """
    most = job.stop_when_failing
    if most is None or failing <= most * max(rows, 1):
        return None
    return f"{words}, and at most {most:.0%} may"


LOCK_JOB = SQL("SELECT state FROM {schema}.job WHERE id = {job} FOR UPDATE")
# Saved twice, as after a lost connection, it changes nothing: its values are absolute, and an end finds itself told.
SAVE = SQL("""
    WITH saved AS (
        UPDATE {schema}.job
        SET selected = %(selected)s, done = %(done)s, failed = %(failed)s, released = %(released)s,
            position = %(position)s, stage = %(stage)s, saved_at = now(), watched = %(watched)s,
            waiting = %(waiting)s, scanned = %(scanned)s, to_scan = %(to_scan)s,
            state = CASE WHEN state = 'open' THEN %(state)s ELSE state END,
            paused_because = CASE WHEN state = 'open' THEN %(because)s ELSE paused_because END
        WHERE id = %(job)s AND (state IN ('open', %(state)s) OR %(has_happened)s)
        RETURNING id
    ), noted AS (
        INSERT INTO {schema}.job_failure (job_id, id, message_id, reason)
        SELECT saved.id, failure.*
        FROM saved, unnest(%(ids)s::bigint[], %(message_ids)s::uuid[], %(reasons)s::text[]) AS failure
        ON CONFLICT DO NOTHING
    )
    SELECT count(*) FROM saved
""")


class Save:
    """Writes down how far a job is, on the connection and in the transaction that the work has.

    Only the process that has the job's lock saves, so it knows the counts, and saves them as they are then.

    Attributes:
        job: as far as its counts are known.
    """

    def __init__(self, schema: str, job: Job) -> None:
        self.job = job
        self._schema = schema
        self._is_read = False  # since this process has the lock

    async def take_lock(self, connection: psycopg.AsyncConnection) -> None:
        """Let no other process run the job while this connection lives; BusyError when one does.

        The first time it reads the job: another process may have gone on with it.
        """
        statement = TAKE_LOCK.format(lock=lock_name(self._schema), job=Literal(self.job.id))
        if await (await connection.execute(statement)).fetchone() != (True,):
            raise BusyError(f"{self.job.words} is run by another process")
        if not self._is_read:  # later on we know better: what was not saved, too
            await connection.execute(self._sql(BEGIN))
            self.job = await self.read(connection)
            self._is_read = True

    async def leave_lock(self, connection: psycopg.AsyncConnection) -> None:
        """Let another process run the job."""
        await connection.execute(LEAVE_LOCK.format(lock=lock_name(self._schema), job=Literal(self.job.id)))

    async def check(self, connection: psycopg.AsyncConnection) -> None:
        """Lock the job until the transaction ends; JobTurnedError when an operator has paused or cancelled it."""
        state = await (await connection.execute(self._sql(LOCK_JOB))).fetchone()
        if state != ("open",):
            raise await self._turned(connection)

    async def __call__(
        self,
        connection: psycopg.AsyncConnection,
        news: Did | StageOutcome | Watched,
        *,
        failures: Sequence[RowFailure] = (),
        has_happened: bool = False,
    ) -> None:
        """Save what the step or the outcome is going to return.

        Args:
            has_happened: it cannot be taken back, so it is counted also when the job was paused or cancelled.
        Raises:
            JobTurnedError: an operator has paused or cancelled the job; the transaction has to be rolled back.
        """
        await self.write(connection, self.with_news(news), failures=failures, has_happened=has_happened)

    def with_news(self, news: Did | StageOutcome | Watched) -> Job:
        """Return the job as it is with what came."""
        job = self.job
        match news:
            case Did():
                return replace(
                    job,
                    done=job.done + news.done,
                    failed=job.failed + news.failed,
                    released=job.released + news.released,
                    position=news.position,
                    selected=job.selected if news.selected is None else news.selected,
                    watched=(job.watched or 0) + news.watched if news.watched else job.watched,
                    scanned=job.scanned if news.scanned is None else news.scanned,
                    to_scan=job.to_scan if news.to_scan is None else news.to_scan,
                )
            case StageOutcome():
                because = why_paused(job, news.rows, news.failing, news.words)
                return replace(
                    job,
                    failed=job.failed + news.failed,
                    stage=job.stage + 1,
                    position=job.position if news.position is None else news.position,
                    state=JobState.PAUSED if because else job.state,
                    paused_because=because,
                )
            case Watched():
                state = JobState.DONE if news.is_over else job.state
                return replace(job, failed=job.failed + news.failed, waiting=news.waiting, state=state)

    async def write(
        self,
        connection: psycopg.AsyncConnection,
        job: Job,
        *,
        failures: Sequence[RowFailure] = (),
        has_happened: bool = False,
    ) -> None:
        """Save the job as it is here, unless an operator has paused or cancelled it: JobTurnedError."""
        values = {
            "job": job.id,
            "selected": job.selected,
            "done": job.done,
            "failed": job.failed,
            "released": job.released,
            "position": job.position,
            "stage": job.stage,
            "watched": job.watched,
            "waiting": job.waiting,
            "scanned": job.scanned,
            "to_scan": job.to_scan,
            "state": job.state if job.state in (JobState.DONE, JobState.PAUSED) else "open",
            "because": job.paused_because,
            "has_happened": has_happened,
            "ids": [failure.id for failure in failures],
            "message_ids": [failure.message_id for failure in failures],
            "reasons": [failure.reason for failure in failures],
        }
        (saved,) = one(await (await connection.execute(self._sql(SAVE), values)).fetchone())
        if saved != 1:
            raise await self._turned(connection)

    async def read(self, connection: psycopg.AsyncConnection) -> Job:
        """Return the job as it is in the table."""
        found = await read_running(connection, self._schema, self.job.id)
        if found is None:
            raise PartlyDoneError(f"{self.job.words} has gone from the table")
        return found

    async def _turned(self, connection: psycopg.AsyncConnection) -> JobTurnedError:
        found = await self.read(connection)
        return JobTurnedError(f"{found.words} is {found.state}")

    def _sql(self, statement: SQL) -> Composed:
        return statement.format(schema=Identifier(self._schema), job=Literal(self.job.id))


class Pace:
    """Decides how many rows may go now.

    Args:
        rate: rows a second; FULL: no bound.
        grain: seconds' worth of rows that a work waits for, because each step costs it a transaction.

    Attributes:
        limit: the rate of now.
    """

    def __init__(self, rate: float, *, grain: float = 0.0) -> None:
        self.limit = rate
        self._grain = grain
        self._loop = asyncio.get_running_loop()
        self._room = 1.0
        self._counted_at = self._loop.time()

    async def room(self, wanted: int) -> int:
        """Wait a little, if there is no room; return how many of `wanted` rows may go now."""
        limit, now = self.limit, self._loop.time()
        if limit == FULL:
            self._counted_at = now
            return wanted
        self._room = min(self._room + (now - self._counted_at) * limit, max(1.0, limit * (SLICE + 2 * self._grain)))
        self._counted_at = now
        needed = min(wanted, max(1.0, limit * self._grain))
        if self._room < needed:
            await asyncio.sleep(min(NAP, max(SLICE, (needed - self._room) / limit) if limit else NAP))
            return 0
        given = min(wanted, int(self._room))
        self._room -= given
        return given

    def give_back(self, rows: int) -> None:
        """Take back what was given, and did not go."""
        self._room += rows


class Work(Protocol):
    """One job's work in this process.

    Attributes:
        pace: how many rows may go.
        most: rows that a step takes at most.
        things, left: what the sentence for a partial end says, as in "3 rows are done, the others stay parked".
        under_way: rows that a step began with, and that a later step counts.
        doubtful: rows that may be done, and are not counted.
        may_be_cut: whether a stop cancels a step; else it is waited for.
    """

    pace: Pace
    most: int
    things: str
    may_be_cut: bool

    @property
    def left(self) -> str: ...

    @property
    def under_way(self) -> int: ...

    @property
    def doubtful(self) -> int: ...

    def opened(self, save: Save) -> AbstractAsyncContextManager[None]:
        """Connect, and take the job's lock on each connection to the database."""

    async def use(self, call: Callable[[psycopg.AsyncConnection], Awaitable[Answer]]) -> Answer:
        """Call with the connection on which the job is saved."""

    async def step(self, room: int, save: Save) -> Step:
        """Change at most `room` rows, and call `save` where the work's own transaction commits."""

    async def settle(self, save: Save, /) -> Did | None:
        """A stop was asked for: finish what is under way, and save it."""

    async def outcome(self, save: Save) -> StageOutcome | Waits | Stuck:
        """Save what came of a stage, and return it."""

    async def watch(self, save: Save, /, *, is_last: bool) -> Watched | None:
        """All is done: save what has become of the rows since the last look, and return it.

        The runner asks again until nothing waits, or for the last time after a while. None: it cannot be known.
        """
