"""Connections to PostgreSQL: psycopg on the driver, ADBC on the executors, both from one string."""

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox_spark.errors import OptionError, OutboxWriteError, one_line

# A server that died silently is noticed within about 10 s; the URL's own parameters override.
DEFAULTS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "outbox-spark",
    # For an encrypted `sslkey` without `sslpassword`: OpenSSL would ask for the passphrase at the terminal.
    "sslpassword": "none",
}


def conninfo(url: str, user: str | None = None, password: str | None = None) -> str:
    """Give the libpq string that driver and executors connect with; it may hold the password.

    Raises:
        OptionError: libpq cannot read the URL.
    """
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # libpq quotes the URL in its message, password and all: not repeated here.
        raise OptionError(
            "the database URL cannot be read; it takes postgresql://user:password@host:5432/database"
        ) from None
    if _is_ambiguous(url, given):
        raise OptionError(
            "the database URL can be read in two ways: in a user or password write %40 for @, %2F for /, %3F for ?"
        )
    own = {key: value for key, value in (("user", user), ("password", password)) if value is not None}
    settings: dict[str, Any] = {**DEFAULTS, **given, **own}
    return make_conninfo(**settings)


def _is_ambiguous(url: str, given: dict[str, Any]) -> bool:
    """Whether libpq has taken a piece of the password for a host, a port or a database: its errors would repeat it."""
    port = str(given.get("port") or "")
    if port.strip(",0123456789"):
        return True
    _, is_url, rest = url.partition("://")
    credentials, _, behind = rest.partition("@")
    behind = rest if "/" in credentials else behind  # libpq looks for a user no further than to the first slash
    return bool(is_url) and "@" in behind.partition("?")[0]


def connect(info: str) -> psycopg.Connection:
    """Open a connection in autocommit mode.

    Raises:
        OutboxWriteError: no host lets us in; libpq's own words tell why.
    """
    try:
        return psycopg.connect(info, autocommit=True)
    except psycopg.OperationalError as error:
        raise OutboxWriteError(one_line(error)) from None
