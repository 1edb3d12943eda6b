"""The console's connections: a few, shared by all requests, each statement ended in time."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from relay.config.settings import ConsoleSettings, DatabaseSettings, Settings
from relay.errors import DatabaseUnavailableError
from relay.operate.reconcile.inbox import OWN, of_inbox
from relay.operate.session import in_words, limit_statements
from relay.servers.postgres.bounded_values import bound_values
from relay.servers.postgres.database import conninfo, make_ours
from relay.servers.postgres.tables import Tables

MOST_CONNECTIONS = 8
INBOX_URL = "console.inbox_url"


def inbox_of(settings: Settings) -> DatabaseSettings | None:
    """Return where the consumers' inbox is; None: in the database of the outbox."""
    console = settings.console
    if not console.inbox_url.get_secret_value():
        return None
    return settings.database.model_copy(update={"url": console.inbox_url, "schema_name": console.inbox_schema})


class Database:
    """A pool of connections, for functions that block: they run in threads.

    Args:
        url: what the operator calls its URL.
        most: connections.
        patience: seconds to wait for one; database.connect_timeout unless given.
    """

    def __init__(
        self,
        database: DatabaseSettings,
        console: ConsoleSettings,
        *,
        url: str = OWN,
        most: int = MOST_CONNECTIONS,
        patience: float | None = None,
    ) -> None:
        self._database = database
        self._schema = database.schema_name
        self._url = url
        self._timeout = console.statement_timeout
        self._pool = ConnectionPool(
            lambda: conninfo(database, application_name="relay console"),
            kwargs={"autocommit": True},
            configure=self._configure,
            check=ConnectionPool.check_connection,
            min_size=0,
            max_size=most,
            timeout=database.connect_timeout if patience is None else patience,
            open=False,
        )

    def _configure(self, connection: psycopg.Connection) -> None:
        make_ours(connection, self._database)
        limit_statements(connection, self._timeout)
        bound_values(connection)

    def open(self) -> None:
        """Begin; an unreachable database is not waited for."""
        self._pool.open(wait=False)

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    @contextmanager
    def session(self) -> Iterator[Tables]:
        """Yield the tables on an autocommit connection.

        Raises:
            DatabaseUnavailableError: no connection, or it was lost.
            SchemaError, AccessError: the tables are missing, or not ours to read.
            DeadlineError: a statement took longer than console.statement_timeout.
        """
        with of_inbox(self._url):
            try:
                with (
                    self._pool.connection() as connection,
                    in_words(connection, self._schema, self._timeout, url=self._url),
                ):
                    yield Tables(connection, self._schema)
            except (PoolTimeout, PoolClosed) as error:  # the latter while the console ends
                raise DatabaseUnavailableError(f"no connection to PostgreSQL: {error}") from error
