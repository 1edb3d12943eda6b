"""A connection for an operator's command: every wait bounded, and errors in words that name the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime

import psycopg
from psycopg import errors
from psycopg.abc import Buffer
from psycopg.sql import SQL, Identifier
from psycopg.types.datetime import DateBinaryLoader, DateLoader, TimestamptzBinaryLoader, TimestamptzLoader

from relay.compatibility import READ_TABLES, refuse_newer
from relay.config.settings import DatabaseSettings
from relay.database import connect
from relay.errors import AccessError, DatabaseUnavailableError, DeadlineError, SchemaError
from relay.operate.revision import head_revision
from relay.statement_fault import refused_or_lost

# Two days from the ends of what Python can tell: any time zone can show them.
FIRST, LAST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)

SET_TIMEOUT = SQL("SELECT set_config('statement_timeout', %(milliseconds)s, false)")


@contextmanager
def session(database: DatabaseSettings, *, timeout: float | None = None) -> Iterator[psycopg.Connection]:
    """Yield an autocommit connection to a database that has the tables.

    Args:
        timeout: seconds for each statement, in place of database.command_timeout.
    Raises:
        DatabaseUnavailableError: no connection, or it was lost.
        SchemaError: the tables are missing, older than this release, or so new that it does not run on them. Other
            newer ones are served: a migration runs before the relays are replaced.
        AccessError, DeadlineError: what the database refused or took too long for.
    """
    seconds = timeout or database.command_timeout
    connection = connect(database)
    try:
        with in_words(connection, f"no outbox tables in schema {database.schema_name}", seconds):
            limit_statements(connection, seconds)
            bound_moments(connection)
            _check_revision(connection, database.schema_name)
            yield connection
    finally:
        connection.close()


def limit_statements(connection: psycopg.Connection, seconds: float) -> None:
    """Let the server end each statement of this session after so many seconds."""
    connection.execute(SET_TIMEOUT, {"milliseconds": str(round(seconds * 1000))})


def bound_moments(connection: psycopg.Connection) -> None:
    """Read infinite moments, and years that Python does not know, as the first or the last that it knows.

    The driver would refuse the whole answer for one such row, which any writer can write.
    """
    for loader in (_Moment, _BinaryMoment):
        connection.adapters.register_loader("timestamptz", loader)
    for of_days in (_Day, _BinaryDay):
        connection.adapters.register_loader("date", of_days)


class _Moment(TimestamptzLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            return FIRST if _is_early(data) else LAST


class _BinaryMoment(TimestamptzBinaryLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            return FIRST if _is_negative(data) else LAST


class _Day(DateLoader):
    def load(self, data: Buffer) -> date:
        try:
            return super().load(data)
        except psycopg.DataError:
            return (FIRST if _is_early(data) else LAST).date()


class _BinaryDay(DateBinaryLoader):
    def load(self, data: Buffer) -> date:
        try:
            return super().load(data)
        except psycopg.DataError:
            return (FIRST if _is_negative(data) else LAST).date()


def _is_early(data: Buffer) -> bool:
    return bytes(data) == b"-infinity" or bytes(data).endswith(b"BC")


def _is_negative(data: Buffer) -> bool:
    return bool(bytes(data)[0] & 0x80)  # a signed number, counted from 2000


@contextmanager
def in_words(connection: psycopg.Connection, lack: str, seconds: float, *, url: str = "database.url") -> Iterator[None]:
    """Yield the errors of this connection in words; raises as `session`.

    Args:
        lack: what is said of a database where a table is missing: "no ...".
        seconds: after which its statements are ended.
        url: where the connection's URL was found.
    """
    try:
        yield
    except (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName) as error:
        raise SchemaError(
            f"database {connection.info.dbname} has {lack}: run `relay migrate`, or check database.schema"
        ) from error
    except errors.InsufficientPrivilege as error:
        raise AccessError(
            f"{error.diag.message_primary}: grant it to role {connection.info.user} (`relay config roles` prints the"
            f" roles to grant), or name another in {url}"
        ) from error
    except errors.ReadOnlySqlTransaction as error:
        raise AccessError(
            f"{connection.info.host} is read only, as a standby is: add target_session_attrs=read-write to {url}"
        ) from error
    except errors.QueryCanceled as error:
        raise DeadlineError("PostgreSQL", seconds) from error
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(refused_or_lost(error)) from error


def _check_revision(connection: psycopg.Connection, schema: str) -> None:
    row = connection.execute(READ_TABLES.format(schema=Identifier(schema))).fetchone()
    (found, note), wanted = row or (None, None), head_revision()
    # Revisions are numbered, so an older one compares less.
    if found is None or found < wanted:
        raise SchemaError(
            f"the outbox tables in schema {schema} are of version {found or 'none'}, and this release needs {wanted}:"
            " run `relay migrate`"
        )
    refuse_newer(schema, found, note)
