"""Bring the tables to the version of this release, or back to an earlier one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TextIO, cast

import psycopg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError
from psycopg.sql import Identifier
from pydantic import SecretStr

import relay
from relay.config.loading import load
from relay.config.settings import DatabaseSettings
from relay.errors import SchemaError, UsageError
from relay.operate.schema.lock_wait import LockLimits, LockWait
from relay.servers.postgres.compatibility import READ_TABLES, SCRIPTS, head_revision, note_of, refuse_newer
from relay.servers.postgres.database import connect, login_of, one_line

VERSION_TABLE = "migration"
ONE_AT_A_TIME = Lock()  # Alembic keeps the current migration in globals of the process
NEEDS_OWNER = (
    "; run it as the role that owns the tables, which for the first migration needs CREATE on the database."
    " `relay config roles` prints the roles of all others"
)
OWN_ALEMBIC = (
    "if this database has other Alembic migrations, add the hooks of relay.alembic to their env.py"
    " (docs/database.md): autogenerate then leaves the outbox alone"
)

TAKE_LOCK = sa.text("SELECT pg_advisory_lock(hashtextextended(:schema || '.migrate', 0))")


def migrate_at(url: str, schema: str) -> None:
    """Migrate the database of a URL to this release, from inside an application.

    Args:
        url: as libpq takes it; its login owns the tables.
        schema: where they are.
    Raises:
        OutboxError: as `relay migrate` says it.
    """
    with ONE_AT_A_TIME:
        migrate(DatabaseSettings(url=SecretStr(url), schema_name=schema))


def migrate(
    database: DatabaseSettings,
    revision: str = "head",
    *,
    limits: LockLimits | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> None:
    """Upgrade to `revision`. Several processes may call this at once: one works, the others wait and find it done.

    Each migration is one transaction: interrupted, it leaves the version before. Tables that are ahead of this release
    are left as they are.

    Args:
        tell: is given a line for each wait, for tables that are ahead, and for the first migration of a schema.
    Raises:
        DatabaseUnavailableError: no connection.
        BusyError: a session kept a lock for too long; the version that needed it is undone.
        SchemaError: the tables need a later release, or PostgreSQL refused a statement; nothing of it was done.
    """
    with _working(database, limits, tell) as work:
        if work.found is not None and work.found > head_revision():
            tell(
                f"schema {database.schema_name} is of version {work.found}, ahead of this release's {head_revision()};"
                f" release {relay.__version__} runs on it, and there is nothing to do"
            )
            return
        for script in reversed(list(ScriptDirectory(str(SCRIPTS)).iterate_revisions(revision, work.found or "base"))):
            work.run(command.upgrade, script.revision, f"version {script.revision}")
        if work.found is None:
            tell(OWN_ALEMBIC)


def downgrade(
    database: DatabaseSettings,
    revision: str,
    *,
    limits: LockLimits | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> None:
    """Go back to `revision`; `base` drops every table with all its rows.

    Args:
        as `migrate`.
    Raises:
        UsageError: the tables cannot go back to this revision; and as `migrate`.
    """
    with _working(database, limits, tell) as work:
        for script in _way_back(work.found, revision):
            below = str(script.down_revision or "base")
            work.run(command.downgrade, below, f"the way back from version {script.revision}")


def dropped_tables(found: str | None, revision: str) -> list[str]:
    """Return the tables that a downgrade from `found` to `revision` drops with all their rows, the oldest first.

    Raises:
        as `downgrade`.
    """
    return [table for script in reversed(_way_back(found, revision)) for table in script.module.drops]


def write_sql(database: DatabaseSettings, output: TextIO) -> None:
    """Write the statements that `migrate` would run on an empty database; connects to no server."""
    command.upgrade(_config(database, output), "head", sql=True)


def current_revision(database: DatabaseSettings) -> str | None:
    """Return the revision in the database; None when it has no outbox tables."""
    with sqlalchemy_engine(database).connect() as connection:
        return _revision(connection, database.schema_name)


def settings_of(config: Config) -> tuple[str, Callable[[], AbstractContextManager[sa.Connection]]]:
    """Return the schema for migrations/env.py and a way to a locked connection.

    The plain `alembic` command, which developers use, has no settings: it gets those of the environment.
    """
    given = config.attributes.get("connection")
    database = config.attributes.get("database") or load().settings.database
    if given is not None:
        return database.schema_name, lambda: nullcontext(given)
    return database.schema_name, partial(_locked_connection, database)


def note_oldest_release(scripts: ScriptDirectory, /, *, ctx: MigrationContext, heads: set[str], **_: Any) -> None:
    """Leave the oldest release that runs on the tables in the database, in the transaction of each migration."""
    applied = scripts.iterate_revisions(tuple(heads), "base") if heads else ()
    oldest = [script.module.oldest_release for script in applied]
    note = f"'{note_of(oldest)}'" if oldest else "NULL"
    ctx.execute(f"COMMENT ON TABLE {ctx.version_table_schema}.{VERSION_TABLE} IS {note}")


def sqlalchemy_engine(database: DatabaseSettings) -> sa.Engine:
    """Return an engine without a pool; several hosts and every other libpq parameter work as in `connect`."""
    return sa.create_engine(
        "postgresql+psycopg://", creator=lambda: _plain_connection(database), poolclass=sa.pool.NullPool
    )


def _plain_connection(database: DatabaseSettings) -> psycopg.Connection:
    connection = connect(database)
    connection.autocommit = False
    return connection


@dataclass(frozen=True, slots=True)
class _Work:
    """A session that holds the lock of migrations, and the way to each version."""

    config: Config
    waiting: LockWait
    found: str | None  # the version at the start

    def run(self, step: Callable[[Config, str], None], version: str, what: str) -> None:
        self.waiting.run(lambda: step(self.config, version), what)


@contextmanager
def _working(database: DatabaseSettings, limits: LockLimits | None, tell: Callable[[str], object]) -> Iterator[_Work]:
    schema = database.schema_name
    # The engine has no pool: the end of this block ends the session, and with it the lock.
    with (
        _refusals_named(),
        sqlalchemy_engine(database).connect() as connection,
        LockWait(database, connection, limits or LockLimits(), tell) as waiting,
    ):
        # Nobody waits behind this lock but other migrations, so no rest is needed between two tries.
        tell(login_of(cast("psycopg.Connection", connection.connection.driver_connection)))
        waiting.run(partial(_prepare, connection, schema), "relay migrate", rest=0)
        config = _config(database)
        config.attributes["connection"] = connection
        found = _found(connection, schema)
        yield _Work(config, waiting, found)


@contextmanager
def _locked_connection(database: DatabaseSettings) -> Iterator[sa.Connection]:
    """Yield the connection of the plain `alembic` command: it tries once, and gives way as `relay migrate` does."""
    with (
        sqlalchemy_engine(database).connect() as connection,
        LockWait(database, connection, LockLimits(), print) as waiting,
    ):
        waiting.run(partial(_prepare, connection, database.schema_name), "alembic", rest=0)
        yield connection


def _prepare(connection: sa.Connection, schema: str) -> None:
    connection.execute(TAKE_LOCK, {"schema": schema})
    # IF NOT EXISTS would ask for the right to create schemas even where ours is there already.
    if not sa.inspect(connection).has_schema(schema):
        connection.execute(sa.schema.CreateSchema(schema))
    connection.commit()


def _way_back(found: str | None, revision: str) -> list[Script]:
    """Return the migrations above `revision`, the newest first."""
    if found is not None and found > head_revision():
        raise SchemaError(
            f"the tables are of version {found}, and release {relay.__version__} goes to {head_revision()}:"
            f" only the release that brought version {found} knows the way back from it"
        )
    applied = list(ScriptDirectory(str(SCRIPTS)).iterate_revisions(found or "base", "base"))
    versions = [*(script.revision for script in applied), "base"]
    if revision not in versions:
        raise UsageError(
            f"the tables are of version {found or 'base'}, and go back to {', '.join(versions)}: not to {revision}"
        )
    return applied[: versions.index(revision)]


def _revision(connection: sa.Connection, schema: str) -> str | None:
    options = {"version_table": VERSION_TABLE, "version_table_schema": schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _found(connection: sa.Connection, schema: str) -> str | None:
    """Return the version of the tables; raises SchemaError when they need a later release."""
    found = _revision(connection, schema)
    if found is not None and found > head_revision():
        statement = READ_TABLES.format(schema=Identifier(schema)).as_string()
        refuse_newer(schema, *connection.exec_driver_sql(statement).one())
    connection.rollback()
    return found


@contextmanager
def _refusals_named() -> Iterator[None]:
    try:
        yield
    except sa.exc.DBAPIError as error:
        cause = error.orig or error
        remedy = NEEDS_OWNER if isinstance(cause, psycopg.errors.InsufficientPrivilege) else ""
        raise SchemaError(
            f"the migration stopped, and what it had not finished is undone: {one_line(cause)}{remedy}"
        ) from error
    except CommandError as error:
        raise SchemaError(f"{error}; this is release {relay.__version__}, which goes to {head_revision()}") from error


def _config(database: DatabaseSettings, output: TextIO | None = None) -> Config:
    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["database"] = database
    return config
