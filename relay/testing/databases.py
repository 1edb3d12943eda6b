"""Databases with the outbox's tables: one that is there, or a fresh one for each test."""

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier

from relay.errors import ConfigurationError, importing

TEMPLATE = "outbox_template_"
TAKE_LOCK = SQL("SELECT pg_advisory_lock(hashtextextended('outbox_template', 0))")
TEMPLATES = SQL("SELECT datname FROM pg_database WHERE starts_with(datname, %s)")


def migrate(url: str, *, schema: str = "outbox") -> None:
    """Make the outbox's tables in a database, or bring them to this release, as `relay migrate` does.

    Args:
        url: as libpq takes it; its login owns the tables.
        schema: where they are.
    Raises:
        OutboxError: as `relay migrate` says it.
        MissingExtraError: the extra `testing` is not installed.
    """
    with importing("testing"):
        from pydantic import SecretStr  # noqa: PLC0415

        from relay.config.settings import DatabaseSettings  # noqa: PLC0415
        from relay.operate.schema import migrate as tables  # noqa: PLC0415

    tables.migrate(DatabaseSettings(url=SecretStr(url), schema_name=schema))


@contextmanager
def template_database(server_url: str) -> Iterator[str]:
    """Yield the URL of a fresh database with the outbox's tables, which is dropped at the end.

    It is a copy: the first call on a server migrates a template, `outbox_template_...`, which stays there for the next
    run. Several processes may call this at once.

    Args:
        server_url: of any database of the server; its login needs the right CREATEDB.
    """
    name = f"outbox_test_{secrets.token_hex(8)}"
    url = _with_database(server_url, name)
    with closing(psycopg.connect(server_url, autocommit=True)) as server:
        template = _template(server, server_url)
        server.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template)))
    try:
        yield url
    finally:
        with closing(psycopg.connect(server_url, autocommit=True)) as server:
            server.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))


def _template(server: psycopg.Connection, server_url: str) -> str:
    """Return the name of the migrated database, which is made when it is not there yet."""
    with importing("testing"):
        from relay.operate.revision import head_revision  # noqa: PLC0415

    # The tables have a part for each of the next days: those of yesterday's template end a day earlier.
    name = f"{TEMPLATE}{head_revision()}_{datetime.now(UTC):%Y%m%d}"
    server.execute(TAKE_LOCK)  # until the end of the session
    found = {row[0] for row in server.execute(TEMPLATES, [TEMPLATE])}
    if name not in found:
        for old in found:
            server.execute(SQL("DROP DATABASE IF EXISTS {}").format(Identifier(old)))
        unfinished = f"{TEMPLATE}unfinished"
        server.execute(SQL("CREATE DATABASE {}").format(Identifier(unfinished)))
        migrate(_with_database(server_url, unfinished))
        server.execute(SQL("ALTER DATABASE {} RENAME TO {}").format(Identifier(unfinished), Identifier(name)))
    return name


def _with_database(url: str, name: str) -> str:
    """Return the URL of another database of the same server, in the form that the given one has.

    Raises:
        ConfigurationError: libpq takes the name of the database from another place of it.
    """
    is_url = url.startswith(("postgresql://", "postgres://"))
    other = urlsplit(url)._replace(path=f"/{name}").geturl() if is_url else make_conninfo(url, dbname=name)
    if conninfo_to_dict(other).get("dbname") != name:
        raise ConfigurationError("server_url must name its database as its path, as in postgresql://user@host/postgres")
    return other
