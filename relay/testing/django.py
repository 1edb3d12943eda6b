"""The outbox in the tests of a Django project: test cases with assertions.

`relay.django.Migrate` in a migration of the project makes the tables, also in the test database.

    class CheckOut(OutboxTestCase):
        def test_an_order_makes_an_event(self):
            place_order(self.client)

            self.outbox.assert_written("OrderPlaced", key=("order", "1"))
"""

import asyncio
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any

from relay.alembic import OURS
from relay.errors import importing
from relay.testing.outbox import Outbox

with importing("django"):
    from django.db import connections, transaction
    from django.test import TestCase, TransactionTestCase, override_settings
    from django.utils.connection import ConnectionProxy
    from psycopg.sql import SQL, Identifier

    from relay.django import where

Mixed: Any = TransactionTestCase if TYPE_CHECKING else object

__all__ = ["OutboxTestCase", "OutboxTransactionTestCase", "clear_outbox"]

READ_TABLES = """
    SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = %s AND relkind IN ('r', 'p') AND NOT relispartition
"""
KEPT = {"migration", "inbox_memory"}  # migrations have written their rows
FIRST = ("message", "quarantine")  # what triggers note of their rows is deleted after them
LAST = ("pool",)  # others refer to it


def clear_outbox(database: str | None = None, schema: str | None = None) -> None:
    """Delete the rows of the outbox and of the inboxes in its schema, as Django does with those of its models.

    Args:
        database: the alias of the database; else `OUTBOX_RELAY_DATABASE`.
        schema: where the tables are; else `OUTBOX_RELAY_SCHEMA`.
    """
    alias, schema = database or where.alias(), schema or where.schema()
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(READ_TABLES, [schema])
        found = {name for (name,) in cursor.fetchall() if OURS.fullmatch(name)} - KEPT
        for name in sorted(found, key=lambda name: (name not in FIRST, name in LAST, name)):
            cursor.execute(SQL("DELETE FROM {}").format(Identifier(schema, name)).as_string())


class TakenConnections:
    """Django's connections as the thread has them; in the thread that has taken this and in loops, the one of then.

    A loop, of `asyncio.run` or of `async_to_sync` in another thread, would have one of another transaction.
    """

    def __init__(self, alias: str) -> None:
        self._taken = connections[alias]
        self._thread = get_ident()

    def __getitem__(self, alias: str) -> Any:
        return self._taken if get_ident() == self._thread or _runs_loop() else connections[alias]


def _runs_loop() -> bool:
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


class WithOutbox(Mixed):
    """The outbox of a test case, which begins with an empty one.

    Attributes:
        outbox_database: the alias of its database, which is added to `databases`; else `OUTBOX_RELAY_DATABASE`.
        outbox_schema: where its tables are; else `OUTBOX_RELAY_SCHEMA`.
    """

    outbox_database: str | None = None
    outbox_schema: str | None = None

    def __init_subclass__(cls, **given: Any) -> None:
        """Allow the outbox's database, which Django reads of the class before it makes the test databases."""
        super().__init_subclass__(**given)
        if cls.__module__ != __name__ and cls.databases != "__all__":  # here there may be no settings yet
            cls.databases = {*cls.databases, cls.outbox_database or where.alias()}

    @classmethod
    def setUpClass(cls) -> None:
        with override_settings(**(cls._overridden_settings or {})):  # of the class; `super` makes its data, too
            clear_outbox(cls.outbox_database, cls.outbox_schema)  # of what a run that was killed has left
        super().setUpClass()

    @property
    def outbox(self) -> Outbox:
        """Return the outbox as Django's connection sees it, with what is not committed.

        Each thread has its own connection. In an asynchronous test, call a method by `sync_to_async`, as Django's own.
        """
        alias = self.outbox_database or where.alias()
        return Outbox(ConnectionProxy(TakenConnections(alias), alias), schema=self.outbox_schema or where.schema())


class OutboxTestCase(WithOutbox, TestCase):
    """A `TestCase` of Django: its transaction is rolled back after each test, and the events with it."""


class OutboxTransactionTestCase(WithOutbox, TransactionTestCase):
    """A `TransactionTestCase` of Django. It also clears the outbox, which is no model, after each test."""

    @property
    def outbox_url(self) -> str:
        """Return the test database as an `Inbox` takes it, whose connections see only what is committed."""
        return where.url_of(connections[self.outbox_database or where.alias()])

    def _fixture_teardown(self) -> None:
        super()._fixture_teardown()
        clear_outbox(self.outbox_database, self.outbox_schema)
