"""Databases with the outbox's tables: one that is there, or a fresh one for each test."""

import re
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier

from relay.errors import ConfigurationError, importing

# Each name has its day, so that what a killed run has left is known later.
TEMPLATE, UNFINISHED, TEST = "outbox_template", "outbox_unfinished", "outbox_test"
OURS = re.compile(r"(outbox_template_\d{4}|outbox_unfinished|outbox_test)_(?P<day>\d{8})_[0-9a-f]{8,16}")
LEFT_AFTER = timedelta(days=2)
LIBPQ_URL = "a URL of libpq, postgresql://user:password@host:5432/postgres"
SCHEMA = "at most 40 lower-case letters, digits and _, no digit first"
SERVER_URL = "server_url (the fixtures take it from OUTBOX_TEST_SERVER_URL)"

TAKE_LOCK = SQL("SELECT pg_advisory_lock(hashtextextended('outbox_template', 0))")
DATABASES = SQL("SELECT datname FROM pg_database WHERE starts_with(datname, 'outbox_')")
CREATE = SQL("CREATE DATABASE {}")
DROP = SQL("DROP DATABASE IF EXISTS {}")


def migrate(url: str, *, schema: str = "outbox") -> None:
    """Make the outbox's tables in a database, or bring them to this release, as `relay migrate` does.

    Args:
        url: as libpq takes it; its login owns the tables.
        schema: where they are.
    Raises:
        OutboxError: as `relay migrate` says it.
        ConfigurationError: the URL is not libpq's, or no schema has this name.
        MissingExtraError: the extra `testing` is not installed.
    """
    with importing("testing"):
        from pydantic import ValidationError  # noqa: PLC0415

        from relay.operate.schema.migrate import migrate_at  # noqa: PLC0415

    try:
        migrate_at(url, schema)
    except ValidationError as error:  # it shows the URL
        wrong = {each["loc"][0] for each in error.errors()}
        problem = f"url takes {LIBPQ_URL}" if "url" in wrong else f"schema takes {SCHEMA}, and not {schema!r}"
        raise ConfigurationError(f"migrate: {problem}") from None


@contextmanager
def template_database(server_url: str) -> Iterator[str]:
    """Yield the URL of a fresh database with the outbox's tables, which is dropped at the end.

    It is a copy: the first call of a day migrates a template, `outbox_template_...`, which stays on the server. What
    killed runs have left there is dropped two days later. Several processes may call this at once.

    Args:
        server_url: of any database of the server, as libpq takes it; its login needs the right CREATEDB.
    Raises:
        ConfigurationError: the URL is not libpq's, or names its database in another place than its path.
    """
    name = f"{TEST}_{datetime.now(UTC):%Y%m%d}_{secrets.token_hex(8)}"
    url = with_database(server_url, name)
    with _server(server_url) as server:
        template = _template(server, server_url)
        server.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template)))
    try:
        yield url
    finally:
        with _server(server_url) as server:
            server.execute(SQL("{} WITH (FORCE)").format(DROP.format(Identifier(name))))


@contextmanager
def _server(url: str) -> Iterator[psycopg.Connection]:
    with closing(psycopg.connect(url, autocommit=True)) as server:
        server.execute("SET statement_timeout = 0")
        try:
            yield server
        except errors.InsufficientPrivilege as error:
            error.add_note(f"the login {server.info.user!r} needs the right CREATEDB: ALTER ROLE ... CREATEDB")
            raise


def _template(server: psycopg.Connection, server_url: str) -> str:
    """Return the name of the migrated database, which is made when it is not there yet."""
    with importing("testing"):
        from relay.servers.postgres.compatibility import head_revision  # noqa: PLC0415

    # The tables have a part for each of the next days: those of yesterday's template end a day earlier. Another login
    # could not use what this one owns.
    today, login = f"{datetime.now(UTC):%Y%m%d}", sha256(server.info.user.encode()).hexdigest()[:8]
    name = f"{TEMPLATE}_{head_revision()}_{today}_{login}"
    server.execute(TAKE_LOCK)  # until the end of the session, and only for those in the same database
    found = [database for (database,) in server.execute(DATABASES)]
    if name in found:
        return name
    _drop_left(server, found)
    unfinished = f"{UNFINISHED}_{today}_{secrets.token_hex(8)}"
    server.execute(CREATE.format(Identifier(unfinished)))
    try:
        migrate(with_database(server_url, unfinished))
        # A connection to a template keeps all others from copying it.
        server.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(Identifier(unfinished)))
        with suppress(errors.DuplicateDatabase, errors.UniqueViolation):  # a process in another database was faster
            server.execute(SQL("ALTER DATABASE {} RENAME TO {}").format(Identifier(unfinished), Identifier(name)))
    finally:
        server.execute(DROP.format(Identifier(unfinished)))
    return name


def _drop_left(server: psycopg.Connection, databases: list[str]) -> None:
    """Drop what earlier days have left, but for databases in use and those of another login."""
    first = f"{datetime.now(UTC) - LEFT_AFTER:%Y%m%d}"
    for name in databases:
        if (ours := OURS.fullmatch(name)) and ours["day"] < first:
            with suppress(errors.ObjectInUse, errors.InsufficientPrivilege):
                server.execute(DROP.format(Identifier(name)))


def with_database(url: str, name: str) -> str:
    """Return the URL of another database of the same server, in the form that the given one has."""
    scheme, is_url, rest = url.partition("://")
    if is_url and scheme not in {"postgresql", "postgres"}:
        raise ConfigurationError(
            f"{SERVER_URL} is a URL of libpq, which begins with postgresql://, and not {scheme}://"
        )
    try:
        if is_url:
            hosts, query = re.split(r"[/?]", rest, maxsplit=1)[0], rest.partition("?")[2]
            other = f"{scheme}://{hosts}/{name}" + (f"?{query}" if query else "")
        else:
            other = make_conninfo(url, dbname=name)
        found = conninfo_to_dict(other)
    except psycopg.ProgrammingError:  # its words show the URL, with the password
        raise ConfigurationError(f"{SERVER_URL} takes {LIBPQ_URL}") from None
    if found.get("dbname") != name:
        raise ConfigurationError(f"{SERVER_URL} must name its database as its path, as in {LIBPQ_URL}")
    return other
