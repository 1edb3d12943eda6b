"""The console's connections: a few, shared by all requests, each statement ended in time."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout

from relay.config.settings import Settings
from relay.database import conninfo
from relay.errors import DatabaseUnavailableError
from relay.operate.session import in_words, limit_statements

MOST_CONNECTIONS = 8


class Database:
    """A pool of connections, for functions that block: they run in threads.

    Attributes:
        schema: of the outbox tables.
    """

    def __init__(self, settings: Settings) -> None:
        database = settings.database
        self.schema = database.schema_name
        self._lack = f"no outbox tables in schema {database.schema_name}"
        self._timeout = settings.console.statement_timeout
        self._pool = ConnectionPool(
            lambda: conninfo(database, application_name="relay console"),
            kwargs={"autocommit": True},
            configure=lambda connection: limit_statements(connection, self._timeout),
            check=ConnectionPool.check_connection,
            min_size=0,
            max_size=MOST_CONNECTIONS,
            timeout=database.connect_timeout,
            open=False,
        )

    def open(self) -> None:
        """Begin; an unreachable database is not waited for."""
        self._pool.open(wait=False)

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    @contextmanager
    def session(self) -> Iterator[psycopg.Connection]:
        """Yield an autocommit connection.

        Raises:
            DatabaseUnavailableError: no connection, or it was lost.
            SchemaError, AccessError: the tables are missing, or not ours to read.
            DeadlineError: a statement took longer than console.statement_timeout.
        """
        try:
            with self._pool.connection() as connection, in_words(connection, self._lack, self._timeout):
                yield connection
        except PoolTimeout as error:
            raise DatabaseUnavailableError(f"no connection to PostgreSQL: {error}") from error
