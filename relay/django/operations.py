"""The outbox's tables in a migration of a Django project: `operations = [Migrate()]`."""

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from relay.django import where
from relay.errors import importing


class Migrate(Operation):
    """Make the outbox's tables in the database that Django migrates, or bring them to this release.

    It works by a separate connection, and so does not end with Django's transaction. Where `relay migrate` has made the
    tables, it changes nothing. The way back keeps them, with their rows. Other databases than `OUTBOX_RELAY_DATABASE`,
    and those that a router of the project excludes, are left alone.

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
        with importing("django"):
            from relay.operate.schema.migrate import migrate_at  # noqa: PLC0415

        database = schema_editor.connection
        if database.alias != where.alias() or not router.allow_migrate(database.alias, app_label):
            return
        migrate_at(where.url_of(database), self._schema())

    def database_backwards(self, *_: Any) -> None:
        """Do nothing."""

    def describe(self) -> str:
        return f"Make the tables of schema {self._schema()}, as `relay migrate` does"

    def _schema(self) -> str:
        return self.schema or where.schema()
