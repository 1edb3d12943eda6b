"""A connection for an operator's command: every wait bounded, and errors in words that name the remedy."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import psycopg
from psycopg import errors
from psycopg.sql import SQL, Composed, Identifier

from relay.config.settings import DatabaseSettings
from relay.errors import AccessError, DatabaseUnavailableError, DeadlineError, SchemaError
from relay.jobs.work import Answer, Save, Watched
from relay.servers.postgres.bounded_values import bound_values
from relay.servers.postgres.compatibility import READ_TABLES, TABLES_MISSING, head_revision, refuse_newer
from relay.servers.postgres.database import connect, connect_async, one_line
from relay.servers.postgres.statement_fault import refused_or_lost
from relay.servers.postgres.tables import Tables

LACK, URL = "outbox tables", "database.url"
STATEMENT_TIMEOUT = 600.0  # seconds, for a job: one parked row may have a million behind it
SET_TIMEOUT = SQL("SELECT set_config('statement_timeout', %(milliseconds)s, false)")


@contextmanager
def session(database: DatabaseSettings, *, timeout: float | None = None) -> Iterator[Tables]:
    """Yield the tables of a database that has them, on an autocommit connection.

    Args:
        timeout: seconds for each statement, in place of database.command_timeout.
    Raises:
        DatabaseUnavailableError: no connection, or it was lost.
        SchemaError: the tables are missing, older than this release, or so new that it does not run on them. Other
            newer ones are served: a migration runs before the relays are replaced.
        AccessError, DeadlineError: what the database refused or took too long for.
    """
    with open_tables(database, timeout=timeout) as tables:
        _check_revision(tables)
        yield tables


@contextmanager
def open_tables(
    database: DatabaseSettings, *, timeout: float | None = None, lack: str = LACK, url: str = URL
) -> Iterator[Tables]:
    """Yield the tables of a database on an autocommit connection, whether or not they are all there.

    Args:
        timeout: as for `session`.
        lack, url: as for `in_words`.
    Raises:
        OutboxError: as `in_words`; DatabaseUnavailableError: no connection.
    """
    seconds = timeout or database.command_timeout
    connection = connect(database)
    try:
        with in_words(connection, database.schema_name, seconds, lack=lack, url=url):
            limit_statements(connection, seconds)
            bound_values(connection)
            yield Tables(connection, database.schema_name)
    finally:
        connection.close()


class SessionWork:
    """What a job's work is that has one session; when that is lost, the run of the job ends."""

    things = "rows"
    under_way = doubtful = 0
    may_be_cut = False

    def __init__(self, database: DatabaseSettings, *, timeout: float = STATEMENT_TIMEOUT) -> None:
        self._database = database
        self._schema = database.schema_name
        self._timeout = timeout
        self._connection: psycopg.AsyncConnection

    @asynccontextmanager
    async def opened(self, save: Save) -> AsyncIterator[None]:
        """Connect, and take the job's lock.

        Raises:
            ConfigurationError: database.url leads to a pooler that keeps no session, and no lock.
            BusyError: another process runs the job.
            OutboxError: what was refused or lost in the block, in words as by `session`.
        """
        async with await connect_async(self._database) as self._connection:
            with in_words(self._connection, self._schema, self._timeout):
                await self._connection.execute(SET_TIMEOUT, {"milliseconds": str(round(self._timeout * 1000))})
                bound_values(self._connection)
                await save.take_lock(self._connection)
                yield

    async def use(self, call: Callable[[psycopg.AsyncConnection], Awaitable[Answer]]) -> Answer:
        return await call(self._connection)

    def _sql(self, statement: SQL, **parts: Composed) -> Composed:
        return statement.format(schema=Identifier(self._schema), **parts)

    async def settle(self, _: Save) -> None:
        """Nothing is under way between two steps."""

    async def watch(self, _: Save, *, is_last: bool) -> Watched | None:
        """Nothing is known of what becomes of the rows."""
        del is_last
        return None


def limit_statements(connection: psycopg.Connection, seconds: float) -> None:
    """Let the server end each statement of this session after so many seconds."""
    connection.execute(SET_TIMEOUT, {"milliseconds": str(round(seconds * 1000))})


@contextmanager
def in_words(
    connection: psycopg.Connection | psycopg.AsyncConnection,
    schema: str,
    seconds: float,
    *,
    lack: str = LACK,
    url: str = URL,
) -> Iterator[None]:
    """Yield the errors of this connection in words; raises as `session`.

    Args:
        seconds: after which its statements are ended.
        lack: what the schema does not have when a table is missing.
        url: where the connection's URL was found.
    """
    try:
        yield
    except TABLES_MISSING as error:
        raise SchemaError(
            f"database {connection.info.dbname} has no {lack} in schema {schema}: run `relay migrate`, or check"
            " database.schema"
        ) from error
    except errors.InsufficientPrivilege as error:
        raise AccessError(
            f"{error.diag.message_primary}: grant it to role {connection.info.user} (`relay config roles` prints the"
            f" roles to grant), or name another in {url}"
        ) from error
    except errors.ReadOnlySqlTransaction as error:
        if connection.info.parameter_status("in_hot_standby") == "on":
            why = f"is a standby: add target_session_attrs=read-write to {url}"
        else:
            why = "takes no writes by this login: `relay doctor` names what sets default_transaction_read_only"
        raise AccessError(f"{connection.info.host} {why}") from error
    except errors.QueryCanceled as error:
        raise DeadlineError("PostgreSQL", seconds) from error
    except psycopg.DataError as error:  # the net under relay/servers/postgres/bounded_values.py and the tables' CHECKs
        raise SchemaError(f"a row in database {connection.info.dbname} cannot be read: {one_line(error)}") from error
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(refused_or_lost(error)) from error


def _check_revision(tables: Tables) -> None:
    row = tables.execute(READ_TABLES).fetchone()
    (found, note), wanted = row or (None, None), head_revision()
    # Revisions are numbered, so an older one compares less.
    if found is None or found < wanted:
        raise SchemaError(
            f"the outbox tables in schema {tables.schema} are of version {found or 'none'}, and this release needs"
            f" {wanted}: run `relay migrate`"
        )
    refuse_newer(tables.schema, found, note)
