"""Replay jobs as an operator handles them: made, listed, shown, cancelled. Who sends is run.py."""

import getpass
import os
import socket
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Identifier, Literal
from psycopg.types.json import Jsonb

from relay.errors import NotFoundError, UsageError
from relay.replay.selection import Selection
from relay.retention.kind import replay_lock


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table `replay`."""

    id: int
    state: str  # running, interrupted, done, cancelled
    made_at: datetime
    made_by: str
    made_as: str
    filter: dict[str, Any]
    to_exchange: str | None
    routing_key: str | None
    selected: int | None  # None until they are counted
    replayed: int
    failed: int
    position: int
    saved_at: datetime
    cancelled_by: str | None
    cancelled_why: str | None

    @property
    def selection(self) -> Selection:
        return Selection.from_json(self.filter)


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that could not be replayed."""

    id: int
    message_id: UUID
    reason: str
    failed_at: datetime


# The lock: not while retention looks which days are needed (migrations/versions/0011_rights.py).
MAKE = SQL("""
    INSERT INTO {schema}.replay (made_by, filter, to_exchange, routing_key)
    SELECT %(made_by)s, %(filter)s, %(to_exchange)s, %(routing_key)s
    FROM pg_advisory_xact_lock_shared({lock})
    RETURNING id
""")


def make_job(
    connection: psycopg.Connection,
    schema: str,
    selection: Selection,
    *,
    by: str | None = None,
    to_exchange: str | None = None,
    routing_key: str | None = None,
) -> Job:
    """Write a job down; it selects what has been sent until now. `by`: as `operator` takes it."""
    values = {
        "made_by": operator(by),
        "filter": Jsonb(selection.as_json()),
        "to_exchange": to_exchange,
        "routing_key": routing_key,
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


# Who runs a job holds its lock (session.py): an open job without one was interrupted, and can be resumed.
READ_JOBS = SQL("""
    SELECT job.id, CASE WHEN job.state <> 'open' THEN job.state WHEN lock.pid IS NULL THEN 'interrupted' ELSE 'running'
        END AS state, job.made_at, job.made_by, job.made_as, job.filter, job.to_exchange, job.routing_key,
        job.selected, job.replayed, job.failed, job.position, job.saved_at, cancel.done_by AS cancelled_by,
        cancel.why AS cancelled_why
    FROM {schema}.replay AS job
    LEFT JOIN {schema}.operator_audit AS cancel ON cancel.command = 'replay cancel' AND cancel.target = job.id::text
    LEFT JOIN pg_locks AS lock ON lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND lock.classid = (hashtext({lock}) & 4294967295)::oid AND lock.objid = job.id::oid
    WHERE (%(id)s::bigint IS NULL OR job.id = %(id)s) AND (%(before)s::bigint IS NULL OR job.id < %(before)s)
    ORDER BY job.id DESC
    LIMIT %(limit)s
""")


def list_jobs(connection: psycopg.Connection, schema: str, *, limit: int, before: int | None = None) -> list[Job]:
    """Return the newest jobs, or the newest before the job `before`, the newest first."""
    return _read(connection, schema, {"id": None, "before": before, "limit": limit})


def read_job(connection: psycopg.Connection, schema: str, job: int) -> Job:
    """Return one job.

    Raises:
        NotFoundError: there is no job of this id.
    """
    if not (found := _read(connection, schema, {"id": job, "before": None, "limit": 1})):
        raise NotFoundError(f"there is no replay {job}: see `relay replay list`")
    return found[0]


LIST_FAILURES = SQL("""
    SELECT id, message_id, reason, failed_at FROM {schema}.replay_failure
    WHERE replay_id = %(job)s AND id > %(after)s ORDER BY id LIMIT %(limit)s
""")


def list_failures(
    connection: psycopg.Connection, schema: str, job: int, *, limit: int, after: int = 0
) -> list[Failure]:
    """Return the first rows behind the id `after`, by id, that the job could not replay."""
    with connection.cursor(row_factory=class_row(Failure)) as cursor:
        statement = LIST_FAILURES.format(schema=Identifier(schema))
        return cursor.execute(statement, {"job": job, "limit": limit, "after": after}).fetchall()


CANCEL = SQL("""
    WITH cancelled AS (
        UPDATE {schema}.replay SET state = 'cancelled', saved_at = now() WHERE id = %(id)s AND state = 'open'
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    SELECT 'replay cancel', id::text, %(by)s, %(why)s FROM cancelled
""")


def cancel_job(connection: psycopg.Connection, schema: str, job: int, *, by: str, why: str) -> Job:
    """End a job for good, and return it; a process that runs it stops when it saves its position the next time.

    Raises:
        NotFoundError: there is no job of this id.
        UsageError: it has ended already.
    """
    values = {"id": job, "by": by, "why": why}
    changed = connection.execute(CANCEL.format(schema=Identifier(schema)), values).rowcount
    found = read_job(connection, schema, job)
    return found if changed else cancellable(found)


def cancellable(job: Job) -> Job:
    """Return the job; UsageError when it has ended."""
    if job.state not in ("running", "interrupted"):
        raise UsageError(f"replay {job.id} is {job.state}: there is nothing to cancel")
    return job


def _read(connection: psycopg.Connection, schema: str, values: dict[str, Any]) -> list[Job]:
    statement = READ_JOBS.format(schema=Identifier(schema), lock=Literal(f"{schema}.replay"))
    with connection.cursor(row_factory=class_row(Job)) as cursor:
        return cursor.execute(statement, values).fetchall()
