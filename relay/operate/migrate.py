"""Bring the tables to the version of this release."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

import psycopg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError

import relay
from relay.configuration import load
from relay.database import connect
from relay.errors import SchemaError
from relay.operate.revision import SCRIPTS, head_revision
from relay.settings import DatabaseSettings

VERSION_TABLE = "migration"

TAKE_LOCK = sa.text("SELECT pg_advisory_lock(hashtextextended(:schema || '.migrate', 0))")


def migrate(database: DatabaseSettings, revision: str = "head") -> None:
    """Upgrade to `revision`. Several processes may call this at once: one works, the others wait and find it done.

    Each migration is one transaction: interrupted, it leaves the version before.

    Raises:
        DatabaseUnavailableError: no connection.
        SchemaError: the tables are of a later release, or PostgreSQL refused a statement; nothing of it was done.
    """
    with _refusals_named():
        command.upgrade(_config(database), revision)


def downgrade(database: DatabaseSettings, revision: str) -> None:
    """Go back to `revision`; `base` drops every table with all its rows.

    Raises:
        as `migrate`.
    """
    with _refusals_named():
        command.downgrade(_config(database), revision)


def write_sql(database: DatabaseSettings, output: TextIO) -> None:
    """Write the statements that `migrate` would run on an empty database; connects to none."""
    command.upgrade(_config(database, output), "head", sql=True)


def is_at_head(database: DatabaseSettings) -> bool:
    """Tell whether the tables are of this release."""
    return current_revision(database) == head_revision()


def current_revision(database: DatabaseSettings) -> str | None:
    """Tell the revision in the database; None when it has no outbox tables."""
    engine = sqlalchemy_engine(database)
    with engine.connect() as connection:
        options = {"version_table": VERSION_TABLE, "version_table_schema": database.schema_name}
        return MigrationContext.configure(connection, opts=options).get_current_revision()


def settings_of(config: Config) -> tuple[str, Callable[[], AbstractContextManager[sa.Connection]]]:
    """Give migrations/env.py the schema and a way to a locked connection.

    The plain `alembic` command, which developers use, has no settings: it gets those of the environment.
    """
    database = config.attributes.get("database")
    if database is None:
        database = load().settings.database
    return database.schema_name, lambda: _locked_connection(database)


def sqlalchemy_engine(database: DatabaseSettings) -> sa.Engine:
    """Give an engine without a pool; several hosts and every other libpq parameter work as in `connect`."""
    return sa.create_engine(
        "postgresql+psycopg://", creator=lambda: _plain_connection(database), poolclass=sa.pool.NullPool
    )


def _plain_connection(database: DatabaseSettings) -> psycopg.Connection:
    connection = connect(database)
    connection.autocommit = False
    return connection


@contextmanager
def _locked_connection(database: DatabaseSettings) -> Iterator[sa.Connection]:
    # The engine has no pool: the end of this block ends the session, and with it the lock.
    with sqlalchemy_engine(database).connect() as connection:
        connection.execute(TAKE_LOCK, {"schema": database.schema_name})
        # IF NOT EXISTS would ask for the right to create schemas even where ours is there already.
        if not sa.inspect(connection).has_schema(database.schema_name):
            connection.execute(sa.schema.CreateSchema(database.schema_name))
        connection.commit()
        yield connection


@contextmanager
def _refusals_named() -> Iterator[None]:
    try:
        yield
    except sa.exc.DBAPIError as error:
        raise SchemaError(
            f"the migration stopped, and what it had not finished is undone: {' '.join(str(error.orig).split())}"
        ) from error
    except CommandError as error:
        raise SchemaError(f"{error}; this is release {relay.__version__}, which goes to {head_revision()}") from error


def _config(database: DatabaseSettings, output: TextIO | None = None) -> Config:
    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["database"] = database
    return config
