"""Connections to PostgreSQL: deadlines on every step, and no password in any error."""

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.errors import ConfigurationError, DatabaseUnavailableError
from relay.settings import DatabaseSettings

# A peer that died silently is noticed within about 10 s, whether we wait for it or are idle.
KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def conninfo(database: DatabaseSettings, **overrides: Any) -> str:
    """Give the libpq connection string with our deadlines, which the URL's own parameters override.

    Raises:
        ConfigurationError: libpq cannot read the URL.
    """
    try:
        given = conninfo_to_dict(database.url.get_secret_value())
    except psycopg.ProgrammingError:
        # libpq quotes the URL in its message, password and all: not repeated here.
        raise ConfigurationError(
            "database.url (RELAY_DATABASE_URL) is no libpq URL; it takes postgresql://user:password@host:5432/database"
        ) from None
    defaults: dict[str, Any] = {
        "connect_timeout": max(2, round(database.connect_timeout)),  # libpq takes no less
        "application_name": "outbox-relay",
        **KEEPALIVE,
    }
    return make_conninfo(**{**defaults, **given, **overrides})


def connect(database: DatabaseSettings, **overrides: Any) -> psycopg.Connection:
    """Open a connection in autocommit mode.

    Raises:
        DatabaseUnavailableError: no host of the URL lets us in; libpq's own words tell why.
    """
    try:
        return psycopg.connect(conninfo(database, **overrides), autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(_reason(error)) from error


async def connect_async(database: DatabaseSettings, **overrides: Any) -> psycopg.AsyncConnection:
    """Open an asyncio connection in autocommit mode.

    Raises:
        DatabaseUnavailableError: no host of the URL lets us in; libpq's own words tell why.
    """
    try:
        return await psycopg.AsyncConnection.connect(conninfo(database, **overrides), autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(_reason(error)) from error


def _reason(error: psycopg.Error) -> str:
    return " ".join(str(error).split())
