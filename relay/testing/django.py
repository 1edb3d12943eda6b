"""The outbox in the tests of a Django project: test cases with assertions.

`relay.django.Migrate` in a migration of the project makes the tables, also in the test database.

    class CheckOut(OutboxTestCase):
        def test_an_order_makes_an_event(self):
            place_order(self.client)

            self.outbox.assert_written("OrderPlaced", key=("order", "1"))
"""

from typing import TYPE_CHECKING, Any

from relay.errors import importing
from relay.testing.outbox import Outbox

with importing("django"):
    from django.db import connections
    from django.test import TestCase, TransactionTestCase

    from relay.django import where

Mixed: Any = TransactionTestCase if TYPE_CHECKING else object

__all__ = ["OutboxTestCase", "OutboxTransactionTestCase"]


class WithOutbox(Mixed):
    """The outbox of a test case.

    Attributes:
        outbox_database: the alias of its database; else `OUTBOX_RELAY_DATABASE`.
        outbox_schema: where its tables are; else `OUTBOX_RELAY_SCHEMA`.
    """

    outbox_database: str | None = None
    outbox_schema: str | None = None

    @property
    def outbox(self) -> Outbox:
        """Return the outbox as the test's connection sees it, with what is not committed."""
        database = connections[self.outbox_database or where.alias()]
        return Outbox(database, schema=self.outbox_schema or where.schema())


class OutboxTestCase(WithOutbox, TestCase):
    """A `TestCase` of Django: its transaction is rolled back after each test, and the events with it."""


class OutboxTransactionTestCase(WithOutbox, TransactionTestCase):
    """A `TransactionTestCase` of Django. It also deletes the rows of the outbox, which is no model, after each test."""

    @property
    def outbox_url(self) -> str:
        """Return the test database as an `Inbox` takes it, whose connections see only what is committed."""
        return where.url_of(connections[self.outbox_database or where.alias()])

    def _fixture_teardown(self) -> None:
        super()._fixture_teardown()
        self.outbox.clear()
