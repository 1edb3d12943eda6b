"""Jobs as an operator handles them: made, listed, shown, paused, resumed, cancelled; progress that anyone can read.

A process that runs a job holds the job's lock. A job with parked rows looks at its own row in each transaction: once a
pause or a cancel has returned, no more rows are done. A replay looks each time it saves how far it is.
"""

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Identifier, Literal
from psycopg.types.json import Jsonb

from relay.errors import BusyError, NotFoundError, UsageError
from relay.jobs.stages import UNPACED, Pacing
from relay.retention.kind import replay_lock


class JobKind(StrEnum):
    """What a job does: the first four with parked rows, a replay with sent ones."""

    RETRY = "retry"
    DISCARD = "discard"
    ARCHIVE = "archive"
    RESTORE = "restore"
    REPLAY = "replay"


class JobState(StrEnum):
    """What a job is up to."""

    RUNNING = "running"  # a process has its lock
    INTERRUPTED = "interrupted"  # stopped or killed: it can be resumed
    PAUSED = "paused"  # by an operator, or because a stage failed: it can be resumed
    DONE = "done"
    CANCELLED = "cancelled"


CAN_GO_ON = (JobState.INTERRUPTED, JobState.PAUSED)


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table `job`."""

    id: int
    kind: JobKind
    state: JobState
    made_at: datetime
    made_by: str
    made_as: str
    why: str | None
    filter: dict[str, Any]
    to_exchange: str | None
    routing_key: str | None
    selected: int | None  # rows, counted when it was made; a replay counts when it begins
    done: int
    failed: int  # of a replay: rows that the broker refused; of a retry: rows of its stages that came back
    released: int  # rows let go behind those that are done
    position: int  # every selected row up to this id is done or has failed
    saved_at: datetime
    rate: float | None
    stages: list[int]
    stop_when_failing: float | None
    stage: int  # how many have been judged
    paused_at: datetime | None
    paused_by: str | None
    paused_why: str | None
    cancelled_by: str | None
    cancelled_why: str | None

    def __post_init__(self) -> None:
        """Make enums of what the table holds as text."""
        object.__setattr__(self, "kind", JobKind(self.kind))
        object.__setattr__(self, "state", JobState(self.state))

    @property
    def pacing(self) -> Pacing:
        return Pacing(rate=self.rate, stages=tuple(self.stages), stop_when_failing=self.stop_when_failing)

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"{self.kind} {self.id}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that could not be replayed."""

    id: int
    message_id: UUID
    reason: str
    failed_at: datetime


# The lock: not while retention looks which days are needed (migrations/versions/0011_rights.py).
MAKE = SQL("""
    INSERT INTO {schema}.job (kind, made_by, why, filter, to_exchange, routing_key, rate, stages, stop_when_failing)
    SELECT %(kind)s, %(made_by)s, %(why)s, %(filter)s, %(to_exchange)s, %(routing_key)s, %(rate)s, %(stages)s,
        %(stop_when_failing)s
    FROM pg_advisory_xact_lock_shared({lock})
    RETURNING id
""")


def make_job(
    connection: psycopg.Connection,
    schema: str,
    kind: JobKind,
    filter_: dict[str, Any],
    *,
    by: str | None = None,
    why: str | None = None,
    address: tuple[str | None, str | None] = (None, None),
    pacing: Pacing = UNPACED,
) -> Job:
    """Write a job down; it selects what is there until now. `by`: as `operator` takes it.

    Args:
        address: for a replay, the exchange and the routing key in place of those of the rows.
    """
    values = {
        "kind": kind,
        "made_by": operator(by),
        "why": why,
        "filter": Jsonb(filter_),
        "to_exchange": address[0],
        "routing_key": address[1],
        "rate": pacing.rate,
        "stages": list(pacing.stages),
        "stop_when_failing": pacing.stop_when_failing,
    }
    statement = MAKE.format(schema=Identifier(schema), lock=replay_lock(schema))
    (job,) = connection.execute(statement, values).fetchone() or (0,)
    return read_job(connection, schema, job)


def operator(by: str | None = None) -> str:
    """Return who gives a command: as the command was told, else the system's user and host of this process."""
    if by and by.strip():
        return by.strip()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


# Who runs a job holds its lock: an open job without one was interrupted, and can be resumed.
# A release before this one has written 'replay cancel'.
READ_JOBS = SQL("""
    SELECT job.id, job.kind,
        CASE WHEN job.state <> 'open' THEN job.state WHEN job.paused_at IS NOT NULL THEN 'paused'
            WHEN lock.pid IS NULL THEN 'interrupted' ELSE 'running' END AS state,
        job.made_at, job.made_by, job.made_as, job.why, job.filter, job.to_exchange, job.routing_key,
        job.selected, job.done, job.failed, job.released, job.position, job.saved_at, job.rate, job.stages,
        job.stop_when_failing, job.stage, job.paused_at, job.paused_by, job.paused_why,
        cancel.done_by AS cancelled_by, cancel.why AS cancelled_why
    FROM {schema}.job
    LEFT JOIN {schema}.operator_audit AS cancel
        ON cancel.command IN ('job cancel', 'replay cancel') AND cancel.target = job.id::text
    LEFT JOIN pg_locks AS lock ON lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND lock.classid = (hashtext({lock}) & 4294967295)::oid AND lock.objid = job.id::oid
    WHERE %(id)s::bigint IS NULL OR job.id = %(id)s
    ORDER BY job.id DESC
    LIMIT %(limit)s
""")


def list_jobs(connection: psycopg.Connection, schema: str, *, limit: int) -> list[Job]:
    """Return the newest jobs, the newest first."""
    return _read(connection, schema, {"id": None, "limit": limit})


def read_job(connection: psycopg.Connection, schema: str, job: int) -> Job:
    """Return one job.

    Raises:
        NotFoundError: there is no job of this id.
    """
    if not (found := _read(connection, schema, {"id": job, "limit": 1})):
        raise NotFoundError(f"there is no job {job}: see `relay jobs list`")
    return found[0]


LIST_FAILURES = SQL("""
    SELECT id, message_id, reason, failed_at FROM {schema}.replay_failure
    WHERE replay_id = %(job)s ORDER BY id LIMIT %(limit)s
""")


def list_failures(connection: psycopg.Connection, schema: str, job: int, *, limit: int) -> list[Failure]:
    """Return the first rows, by id, that a replay could not send."""
    with connection.cursor(row_factory=class_row(Failure)) as cursor:
        statement = LIST_FAILURES.format(schema=Identifier(schema))
        return cursor.execute(statement, {"job": job, "limit": limit}).fetchall()


# Each changes the job and notes who did so in one statement; {change} and {condition} say how and when.
CHANGE = SQL("""
    WITH changed AS (
        UPDATE {schema}.job SET {change}, saved_at = now() WHERE id = %(id)s AND state = 'open' AND {condition}
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT {command}, id::text, %(by)s, %(why)s, id FROM changed
""")
PAUSE: LiteralString = "paused_at = now(), paused_by = %(by)s, paused_why = %(why)s"
RESUME: LiteralString = "paused_at = NULL, paused_by = NULL, paused_why = NULL, rate = coalesce(%(rate)s, rate)"


def pause_job(connection: psycopg.Connection, schema: str, job: int, *, by: str, why: str | None) -> Job:
    """Let a job do no more until it is resumed, and return it.

    Raises:
        NotFoundError: there is no job of this id.
        UsageError: it is paused already, or has ended.
    """
    changed = _change(
        connection, schema, job, command="job pause", change=PAUSE, condition="paused_at IS NULL", by=by, why=why
    )
    found = read_job(connection, schema, job)
    if not changed:
        raise UsageError(f"{found.name} is {found.state}: there is nothing to pause")
    return found


def resume_job(
    connection: psycopg.Connection,
    schema: str,
    job: int,
    *,
    by: str,
    why: str | None = None,
    rate: float | None = None,
) -> Job:
    """End the pause of a job, and return it; the caller runs it. `rate`: in place of the one that it has.

    Raises:
        NotFoundError: there is no job of this id.
        BusyError: another process runs it.
        UsageError: it has ended.
    """
    found = read_job(connection, schema, job)
    if found.state is JobState.RUNNING:
        raise BusyError(f"{found.name} is run by another process")
    if found.state not in CAN_GO_ON:
        raise UsageError(f"{found.name} is {found.state}: there is nothing to resume")
    _change(
        connection,
        schema,
        job,
        command="job resume",
        change=RESUME,
        condition="true",
        by=by,
        why=why,
        rate=rate,
    )
    return read_job(connection, schema, job)


def cancel_job(connection: psycopg.Connection, schema: str, job: int, *, by: str, why: str) -> Job:
    """End a job for good, and return it; a process that runs it stops when it saves its progress the next time.

    Raises:
        NotFoundError: there is no job of this id.
        UsageError: it has ended already.
    """
    changed = _change(
        connection, schema, job, command="job cancel", change="state = 'cancelled'", condition="true", by=by, why=why
    )
    found = read_job(connection, schema, job)
    return found if changed else cancellable(found)


def cancellable(job: Job) -> Job:
    """Return the job; UsageError when it has ended."""
    if job.state in (JobState.DONE, JobState.CANCELLED):
        raise UsageError(f"{job.name} is {job.state}: there is nothing to cancel")
    return job


TAKE_LOCK = SQL("SELECT pg_try_advisory_lock(hashtext({lock}), %(job)s::integer)")
LEAVE_LOCK = SQL("SELECT pg_advisory_unlock(hashtext({lock}), %(job)s::integer)")


@contextmanager
def job_lock(connection: psycopg.Connection, schema: str, job: Job) -> Iterator[None]:
    """Be the one process that runs a job, until the block or the session ends.

    Raises:
        BusyError: another process runs it.
    """
    lock, values = lock_name(schema), {"job": job.id}
    if connection.execute(TAKE_LOCK.format(lock=lock), values).fetchone() != (True,):
        raise BusyError(f"{job.name} is run by another process")
    try:
        yield
    finally:
        with suppress(psycopg.Error):  # a session that is lost has no locks
            connection.execute(LEAVE_LOCK.format(lock=lock), values)


def lock_name(schema: str) -> Literal:
    """Return the name of the jobs' locks. It is that of replays, so that two releases exclude each other."""
    return Literal(f"{schema}.replay")


def _change(
    connection: psycopg.Connection,
    schema: str,
    job: int,
    *,
    command: str,
    change: LiteralString,
    condition: LiteralString,
    by: str,
    why: str | None,
    rate: float | None = None,
) -> bool:
    statement = CHANGE.format(
        schema=Identifier(schema), change=SQL(change), condition=SQL(condition), command=Literal(command)
    )
    return connection.execute(statement, {"id": job, "by": by, "why": why, "rate": rate}).rowcount > 0


def _read(connection: psycopg.Connection, schema: str, values: dict[str, Any]) -> list[Job]:
    statement = READ_JOBS.format(schema=Identifier(schema), lock=lock_name(schema))
    with connection.cursor(row_factory=class_row(Job)) as cursor:
        return cursor.execute(statement, values).fetchall()
