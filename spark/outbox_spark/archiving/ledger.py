"""Which days are archived: the table `archived_day`, which retention asks, too (relay.retention_waits_for_archive)."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

import psycopg
from psycopg.sql import SQL, Identifier, Literal

from outbox_spark.errors import ArchiveError
from outbox_spark.reading.plan import list_days

TAKE_LOCK = SQL("SELECT pg_try_advisory_lock(hashtextextended({lock}, 0))")
LEAVE_LOCK = SQL("SELECT pg_advisory_unlock(hashtextextended({lock}, 0))")

# The drop of a day asks for it (migrations/versions/0011_rights.py, drop_sent_day).
HOLD = SQL("SELECT pg_advisory_lock_shared(hashtextextended({lock}, 0))")
RELEASE = SQL("SELECT pg_advisory_unlock_shared(hashtextextended({lock}, 0))")

# A day is closed when it is over by the database's clock.
CLOSED = SQL("first < date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'")

READ = SQL("SELECT day, rows, checksum, path FROM {schema}.archived_day ORDER BY day")
NOTE = SQL("INSERT INTO {schema}.archived_day (day, rows, checksum, path) VALUES (%s, %s, %s, %s)")
FORGET = SQL("DELETE FROM {schema}.archived_day WHERE day = %s")


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """A day whose archive was compared with the table."""

    day: date
    rows: int
    checksum: Decimal
    path: str


@contextmanager
def archiving(connection: psycopg.Connection, schema: str) -> Iterator[None]:
    """Be the one that archives. The next one may begin at once, before the server has ended this session.

    Raises:
        ArchiveError: another one is.
    """
    lock = Literal(f"{schema}.archive")
    if connection.execute(TAKE_LOCK.format(lock=lock)).fetchone() != (True,):
        raise ArchiveError("another process archives at this moment: run it again when that has ended")
    try:
        yield
    finally:
        with suppress(psycopg.OperationalError):  # a session that is lost holds nothing
            connection.execute(LEAVE_LOCK.format(lock=lock))


def hold_day(connection: psycopg.Connection, schema: str, day: date) -> None:
    """Let retention keep a day until it is released, or the session ends; ask `closed_days` after this."""
    connection.execute(HOLD.format(lock=Literal(f"{schema}.day {day}")))


def release_day(connection: psycopg.Connection, schema: str, day: date) -> None:
    """Let retention have a day that was held."""
    with suppress(psycopg.OperationalError):  # a session that is lost holds nothing
        connection.execute(RELEASE.format(lock=Literal(f"{schema}.day {day}")))


def closed_days(connection: psycopg.Connection, schema: str) -> list[date]:
    """Return the days of sent rows that are over."""
    return [day.first.date() for day in list_days(connection, schema, CLOSED)]


def require_closed(connection: psycopg.Connection, schema: str, day: date) -> None:
    """Refuse a day that is gone: it would read as one without rows.

    Raises:
        ArchiveError: it is.
    """
    if day not in closed_days(connection, schema):
        raise ArchiveError(f"{day}: the table does not keep it any more")


def archived_days(connection: psycopg.Connection, schema: str) -> dict[date, ArchivedDay]:
    """Return the days that are archived, the oldest first.

    Raises:
        ArchiveError: the database has no such table.
    """
    try:
        rows = connection.execute(READ.format(schema=Identifier(schema))).fetchall()
    except psycopg.errors.UndefinedTable:
        raise ArchiveError(f"table {schema}.archived_day does not exist: run `relay migrate`") from None
    return {row[0]: ArchivedDay(*row) for row in rows}


def note(connection: psycopg.Connection, schema: str, archived: ArchivedDay) -> None:
    """Write down that a day is archived."""
    values = (archived.day, archived.rows, archived.checksum, archived.path)
    connection.execute(NOTE.format(schema=Identifier(schema)), values)


def forget(connection: psycopg.Connection, schema: str, day: date) -> None:
    """Strike out a day, before its files are written again."""
    connection.execute(FORGET.format(schema=Identifier(schema)), [day])
