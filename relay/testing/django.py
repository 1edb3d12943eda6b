"""The outbox in the tests of a Django project: its tables in the test database, and assertions in a test case.

In a migration of the project:

    operations = [relay.testing.django.Migrate()]

In its tests:

    class CheckOut(OutboxTestCase):
        def test_an_order_makes_an_event(self):
            place_order(self.client)

            self.outbox.assert_written("OrderPlaced", key=("order", "1"))
"""

from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.migrations.operations.base import Operation
from django.test import TestCase, TransactionTestCase
from psycopg.conninfo import make_conninfo

from relay.testing.databases import migrate
from relay.testing.outbox import Outbox

Mixed: Any = TransactionTestCase if TYPE_CHECKING else object

__all__ = ["Migrate", "OutboxTestCase", "OutboxTransactionTestCase"]


class Migrate(Operation):  # type: ignore[misc]  # Django has no types
    """Make the outbox's tables in the database that Django migrates, or bring them to this release.

    It works by a separate connection, and so does not end with Django's transaction. Where `relay migrate` has made the
    tables, it changes nothing. The way back keeps them, with their rows.

    Args:
        schema: where the tables are.
    """

    reduces_to_sql = False
    reversible = True

    def __init__(self, schema: str = "outbox") -> None:
        self.schema = schema

    def state_forwards(self, _app_label: str, _state: Any) -> None:
        """Do nothing: the tables are no models of Django."""

    def database_forwards(self, _app_label: str, schema_editor: Any, _from_state: Any, _to_state: Any) -> None:
        django = schema_editor.connection
        django.ensure_connection()
        info = django.connection.info
        migrate(make_conninfo(info.dsn, password=info.password or None), schema=self.schema)

    def database_backwards(self, *_: Any) -> None:
        """Do nothing."""

    def describe(self) -> str:
        return f"Make the tables of schema {self.schema}, as `relay migrate` does"


class WithOutbox(Mixed):  # type: ignore[misc]
    """The outbox of a test case.

    Attributes:
        outbox_database: the alias of its database.
        outbox_schema: where its tables are.
    """

    outbox_database = DEFAULT_DB_ALIAS
    outbox_schema = "outbox"

    @property
    def outbox(self) -> Outbox:
        """Return the outbox as the test's connection sees it, with what is not committed."""
        return Outbox(connections[self.outbox_database], schema=self.outbox_schema)


class OutboxTestCase(WithOutbox, TestCase):  # type: ignore[misc]
    """A `TestCase` of Django: its transaction is rolled back after each test, and the events with it."""


class OutboxTransactionTestCase(WithOutbox, TransactionTestCase):  # type: ignore[misc]
    """A `TransactionTestCase` of Django. It also deletes the rows of the outbox, which is no model, after each test."""

    def _fixture_teardown(self) -> None:
        super()._fixture_teardown()
        self.outbox.clear()
