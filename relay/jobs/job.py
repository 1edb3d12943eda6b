"""The table of jobs: made, listed, shown, paused, resumed, cancelled.

A job's source decides which work does it (relay/operate/bulk.py). The runner saves in the table how far it is, so
another process can read that, and go on after a kill (relay/jobs/runner.py).
"""

import getpass
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Identifier, Literal
from psycopg.types.json import Jsonb

from relay.errors import BusyError, NotFoundError, UsageError
from relay.servers.postgres.tables import Tables


class Kind(StrEnum):
    """What a job does."""

    REPLAY = "replay"  # send again what was sent
    RETRY = "retry"
    DISCARD = "discard"
    ARCHIVE = "archive"  # set aside, restorable
    RESTORE = "restore"  # what was archived or discarded is parked again


class Source(StrEnum):
    """What a job's filter selects from."""

    SENT = "sent"
    PARKED = "parked"
    ARCHIVED = "archived"
    DISCARDED = "discarded"
    DEAD_LETTER = "dead letter"
    QUARANTINED = "quarantined"


class JobState(StrEnum):
    """How a job stands. The table has `open` for a job that waits, runs or was interrupted."""

    WAITING = "waiting"  # for a console to run it
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """How carefully a job goes on.

    Attributes:
        rate: rows a second at most; None: as fast as it can.
        stages: after so many rows in all it waits for their outcome, each time; then come all the others.
        stop_when_failing: it pauses when more than this share of a stage's rows fail.
    """

    rate: float | None = None
    stages: Sequence[int] = ()
    stop_when_failing: float | None = None


NO_CAUTION = Caution()
LEAST_RATE, BELOW_RATE = 0.01, 1_000_000  # rows a second that may be asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an operator asks for; a job is made of it."""

    kind: Kind
    source: Source
    filter: dict[str, Any]
    by: str
    why: str | None = None
    to_exchange: str | None = None
    routing_key: str | None = None
    selected: int | None = None  # as a preview has counted
    caution: Caution = NO_CAUTION
    by_console: bool = False  # a console runs it


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table `job`."""

    id: int
    kind: Kind
    source: Source
    state: JobState
    made_at: datetime
    made_by: str
    made_as: str
    why: str | None
    filter: dict[str, Any]
    to_exchange: str | None
    routing_key: str | None
    rate: float | None
    stages: list[int] | None
    stage: int  # stages that have ended
    stop_when_failing: float | None
    selected: int | None  # None until they are counted
    done: int
    failed: int  # of these, rows that failed again; of a replay, other rows
    released: int  # rows that went along, from behind those that were done
    position: int
    saved_at: datetime
    paused_because: str | None
    by_console: bool
    cancelled_by: str | None
    cancelled_why: str | None
    resumed_by: str | None  # the last time
    watched: int | None  # rows of which it looks what becomes of them; None: of no row
    waiting: int | None  # of these, rows that had not gone out when it looked last; None: before it looked
    scanned: int | None  # letters of the queue that the last run has read
    to_scan: int | None  # letters that were in the queue when it began
    run_seconds: float | None  # since a process began with it the last time; of a job that runs
    began_with: int | None  # rows that were tried before

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))
        object.__setattr__(self, "source", Source(self.source))
        object.__setattr__(self, "state", JobState(self.state))

    @property
    def words(self) -> str:
        """What a command calls it."""
        return f"{self.kind} {self.id}" if self.kind is Kind.REPLAY else f"job {self.id} ({self.kind})"

    @property
    def done_by(self) -> str:
        """Whom the audit names for what the job does."""
        return self.made_by if self.resumed_by is None else f"{self.made_by}, resumed by {self.resumed_by}"

    @property
    def is_over(self) -> bool:
        return self.state in (JobState.DONE, JobState.CANCELLED)

    @property
    def tried(self) -> int:
        """Rows that it has done or failed with."""
        return self.done + self.failed if self.kind is Kind.REPLAY else self.done


@dataclass(frozen=True, slots=True)
class JobFailure:
    """A row that a job could not send, or that failed again in a stage."""

    id: int
    message_id: Any
    reason: str
    failed_at: datetime


# The lock: not while retention looks which days are needed (migrations/versions/0011_rights.py).
# A console alone may write `by_console`: it does such jobs with its own rights.
MAKE = SQL("""
    INSERT INTO {schema}.job (kind, source, made_by, why, filter, to_exchange, routing_key, selected, rate, stages,
        stop_when_failing{console_column})
    SELECT %(kind)s, %(source)s, %(by)s, %(why)s, %(filter)s, %(to_exchange)s, %(routing_key)s, %(selected)s, %(rate)s,
        %(stages)s::bigint[], %(stop_when_failing)s{by_console}
    FROM pg_advisory_xact_lock_shared(hashtextextended({lock}, 0))
    RETURNING id
""")


def make_job(tables: Tables, order: Order) -> Job:
    """Write a job down, and return it; it selects what is there now, and nothing that comes later."""
    caution = order.caution
    values = {
        "kind": order.kind,
        "source": order.source,
        "by": order.by,
        "why": order.why or None,
        "filter": Jsonb(order.filter),
        "to_exchange": order.to_exchange,
        "routing_key": order.routing_key,
        "selected": order.selected,
        "rate": caution.rate,
        "stages": list(caution.stages) or None,
        "stop_when_failing": caution.stop_when_failing,
    }
    column, value = (SQL(", by_console"), SQL(", true")) if order.by_console else (SQL(""), SQL(""))
    lock = Literal(f"{tables.schema}.replay and retention")  # the drop of a day takes it for itself
    (job,) = tables.one(MAKE, values, lock=lock, console_column=column, by_console=value)
    return read_job(tables, job)


def operator(by: str | None = None) -> str:
    """Return who gives a command: as the command was told, else the system's user and host of this process."""
    if by and by.strip():
        return by.strip()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


# Who runs a job holds its lock. An open job without one waits for a console, or was interrupted and can be resumed.
READ_JOBS = SQL("""
    SELECT job.id, job.kind, job.source, CASE WHEN job.state <> 'open' THEN job.state
            WHEN lock.pid IS NOT NULL THEN 'running'
            WHEN job.by_console THEN 'waiting' ELSE 'interrupted' END AS state,
        job.made_at, job.made_by, job.made_as, job.why, job.filter, job.to_exchange, job.routing_key, job.rate,
        job.stages, job.stage, job.stop_when_failing, job.selected, job.done, job.failed, job.released, job.position,
        job.saved_at, job.paused_because, job.by_console, cancel.done_by AS cancelled_by, cancel.why AS cancelled_why,
        job.watched, job.waiting, job.scanned, job.to_scan, job.began_with, CASE WHEN lock.pid IS NOT NULL
            THEN extract(epoch FROM clock_timestamp() - job.began_at)::float8 END AS run_seconds,
        (SELECT done_by FROM {schema}.operator_audit AS resume
         WHERE resume.command = 'jobs resume' AND resume.target = job.id::text
         ORDER BY resume.id DESC LIMIT 1) AS resumed_by
    FROM {schema}.job
    LEFT JOIN {schema}.operator_audit AS cancel
        ON cancel.command IN ('replay cancel', 'jobs cancel') AND cancel.target = job.id::text
    LEFT JOIN pg_locks AS lock ON lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND lock.classid = (hashtext({lock}) & 4294967295)::oid AND lock.objid = job.id::oid
    WHERE (%(id)s::bigint IS NULL OR job.id = %(id)s) AND (%(kind)s::text IS NULL OR job.kind = %(kind)s)
        AND (%(before)s::bigint IS NULL OR job.id < %(before)s)
    ORDER BY job.id DESC
    LIMIT %(limit)s
""")


def list_jobs(tables: Tables, *, limit: int, kind: Kind | None = None, before: int | None = None) -> list[Job]:
    """Return the newest jobs, or the newest before the job `before`, the newest first."""
    return _read(tables, {"id": None, "limit": limit, "kind": kind, "before": before})


def read_job(tables: Tables, job: int) -> Job:
    """Return one job.

    Raises:
        NotFoundError: there is no job of this id.
    """
    if not (found := _read(tables, {"id": job, "limit": 1, "kind": None, "before": None})):
        raise NotFoundError(f"there is no job {job}: see `relay jobs list`")
    return found[0]


@dataclass(frozen=True, slots=True)
class PausedJob:
    """A job that waits for an operator."""

    id: int
    kind: Kind
    because: str | None


@dataclass(frozen=True, slots=True)
class PausedJobs:
    """The newest jobs that wait for an operator, and how many there are."""

    newest: Sequence[PausedJob] = ()
    total: int = 0


LIST_PAUSED = SQL("""
    SELECT id, kind, left(paused_because, %(length)s), count(*) OVER () FROM {schema}.job
    WHERE state = 'paused' ORDER BY id DESC LIMIT %(limit)s
""")


def paused_jobs(tables: Tables, *, limit: int, length: int) -> PausedJobs:
    """Return the newest jobs that are paused, each with so many characters of its reason."""
    found = tables.execute(LIST_PAUSED, {"limit": limit, "length": length}).fetchall()
    newest = [PausedJob(id_, Kind(kind), because) for id_, kind, because, _ in found]
    return PausedJobs(newest, found[0][3] if found else 0)


LIST_FAILURES = SQL("""
    SELECT id, message_id, reason, failed_at FROM {schema}.job_failure
    WHERE job_id = %(job)s AND id > %(after)s ORDER BY id LIMIT %(limit)s
""")


def list_failures(tables: Tables, job: int, *, limit: int, after: int = 0) -> list[JobFailure]:
    """Return the first rows behind the id `after`, by id, that failed in the job."""
    return tables.rows(JobFailure, LIST_FAILURES, {"job": job, "limit": limit, "after": after})


# What ends or continues a job, and the note of it, are one statement.
TURN = SQL("""
    WITH turned AS (
        UPDATE {schema}.job SET state = %(state)s, saved_at = now(), paused_because = %(because)s
        WHERE id = %(id)s AND state = ANY (%(from_states)s) AND state <> %(state)s
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT %(command)s, id::text, %(by)s, %(why)s, id FROM turned
""")


def cancel_job(tables: Tables, job: int, *, by: str, why: str) -> Job:
    """End a job for good, and return it; a process that runs it stops when it saves its position the next time.

    Raises:
        NotFoundError: there is no job of this id.
        UsageError: it has ended already.
    """
    changed = _turn(tables, job, "cancelled", from_states=("open", "paused"), command="cancel", by=by, why=why)
    found = read_job(tables, job)
    return found if changed else cancellable(found)


def cancellable(job: Job) -> Job:
    """Return the job; UsageError when it has ended."""
    if job.is_over:
        raise UsageError(f"{job.words} is {job.state}: there is nothing to cancel")
    return job


def pause_job(tables: Tables, job: int, *, by: str, why: str | None) -> Job:
    """Pause a job, and return it; a process that runs it stops when it saves its position the next time.

    Raises:
        NotFoundError: there is no job of this id.
        UsageError: it has ended already.
    """
    because = f"paused by {by}" + (f": {why}" if why else "")
    _turn(tables, job, "paused", from_states=("open",), command="pause", by=by, why=why, because=because)
    found = read_job(tables, job)
    if found.is_over:
        raise UsageError(f"{found.words} is {found.state}: there is nothing to pause")
    return found


PAUSE = SQL("""
    UPDATE {schema}.job SET state = 'paused', paused_because = %(because)s, saved_at = now()
    WHERE id = %(job)s AND state = 'open'
""")


def pause_itself(tables: Tables, job: int, *, because: str) -> None:
    """Pause a job that cannot go on by itself, and say why."""
    tables.execute(PAUSE, {"job": job, "because": because})


def resume_job(tables: Tables, job: int, *, by: str, why: str | None = None) -> Job:
    """Let a job go on that was paused or interrupted, and return it; the caller runs it.

    Raises:
        NotFoundError: there is no job of this id.
        BusyError: a process runs it.
        UsageError: it has ended already.
    """
    found = read_job(tables, job)
    if found.state is JobState.RUNNING:
        raise BusyError(f"{found.words} is run by another process")
    if found.is_over:
        raise UsageError(f"{found.words} is {found.state}: there is nothing to resume")
    _turn(tables, job, "open", from_states=("paused",), command="resume", by=by, why=why)
    return read_job(tables, job)


# By the lock others see that a job runs, and by the moment how fast.
BEGIN = SQL("""
    UPDATE {schema}.job
    SET began_at = clock_timestamp(), began_with = done + CASE WHEN kind = 'replay' THEN failed ELSE 0 END
    WHERE id = {job} AND state = 'open'
""")
TAKE_LOCK = SQL("SELECT pg_try_advisory_lock(hashtext({lock}), {job}::integer)")
LEAVE_LOCK = SQL("SELECT pg_advisory_unlock(hashtext({lock}), {job}::integer)")


def lock_name(schema: str) -> Literal:
    """Return the name of the jobs' locks. It is that of an older release's replays, so that both exclude each other."""
    return Literal(f"{schema}.replay")


def _turn(
    tables: Tables,
    job: int,
    state: str,
    *,
    from_states: Sequence[str],
    command: str,
    by: str,
    why: str | None,
    because: str | None = None,
) -> bool:
    values = {"id": job, "state": state, "from_states": list(from_states), "command": f"jobs {command}"}
    return tables.execute(TURN, {**values, "by": by, "why": why, "because": because}).rowcount > 0


def _read(tables: Tables, values: dict[str, Any]) -> list[Job]:
    return tables.rows(Job, READ_JOBS, values, lock=lock_name(tables.schema))


async def read_running(connection: psycopg.AsyncConnection, schema: str, job: int) -> Job | None:
    """Return the job that this process runs; None: its row has gone."""
    statement = READ_JOBS.format(schema=Identifier(schema), lock=lock_name(schema))
    async with connection.cursor(row_factory=class_row(Job)) as cursor:
        await cursor.execute(statement, {"id": job, "limit": 1, "kind": None, "before": None})
        return await cursor.fetchone()
