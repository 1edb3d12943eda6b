"""The outbox's tables in a migration of a Django project: `operations = [Migrate()]`."""

from contextlib import closing
from typing import Any

import psycopg
from django.db import router
from django.db.migrations.operations.base import Operation

from relay.django import where
from relay.django.tables import read_outbox
from relay.errors import BusyError, ConfigurationError, importing

# What this transaction has done, the separate connection does not see, or waits for.
READ_SESSION = "SELECT pg_backend_pid(), to_regnamespace(quote_ident(%s)) IS NOT NULL"
SEES_SCHEMA = "SELECT FROM pg_namespace WHERE nspname = %s"


class Migrate(Operation):
    """Make the outbox's tables in the database that Django migrates, or bring them to this release.

    It works by a separate connection, and so does not end with Django's transaction. Where `relay migrate` has made the
    tables, it changes nothing, also where the login may only write to them. The way back keeps them, with their rows.
    Other databases than `OUTBOX_RELAY_DATABASE`, and those that a router of the project excludes, are left alone.

    Args:
        schema: where the tables are; else `OUTBOX_RELAY_SCHEMA`.
    """

    reduces_to_sql = False
    reversible = True

    def __init__(self, schema: str | None = None) -> None:
        self.schema = schema

    def state_forwards(self, _app_label: str, _state: Any) -> None:
        """Do nothing: the tables are no models of Django."""

    def database_forwards(self, app_label: str, schema_editor: Any, _from_state: Any, _to_state: Any) -> None:
        database = schema_editor.connection
        if database.alias != where.alias() or not router.allow_migrate(database.alias, app_label):
            return
        found = read_outbox(database, self._schema())
        if found is not None and not found.may_read_version and not found.missing:
            return  # the login only writes: the tables are another one's
        _migrate(database, self._schema())

    def database_backwards(self, *_: Any) -> None:
        """Do nothing."""

    def describe(self) -> str:
        return f"Make the tables of schema {self._schema()}, as `relay migrate` does"

    def _schema(self) -> str:
        return self.schema or where.schema()


def _migrate(database: Any, schema: str) -> None:
    with importing("django"):
        from relay.operate.schema.migrate import migrate_at  # noqa: PLC0415

    url = where.url_of(database)
    with database.cursor() as cursor:
        cursor.execute(READ_SESSION, [schema])
        pid, has_schema = cursor.fetchone()
    with closing(psycopg.connect(url, autocommit=True)) as other:
        if has_schema and not other.execute(SEES_SCHEMA, [schema]).rowcount:
            raise ConfigurationError(_own_transaction(f"has made schema {schema}"))
    try:
        migrate_at(url, schema)
    except BusyError as error:
        if f"session {pid} of" not in str(error):
            raise
        raise ConfigurationError(_own_transaction("holds a lock that it needs")) from error


def _own_transaction(what: str) -> str:
    problem = f"the transaction of this migration {what}, and Migrate() works by another connection"
    return f"{problem}, which would wait for its end: put Migrate() into a separate migration"
