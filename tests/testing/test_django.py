"""A Django project has the outbox in its test database, by one operation in a migration, and leaves no rows there."""

from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.outbox import Event, add
from relay.testing import Outbox, migrate
from relay.testing.servers.postgres import PostgresServer
from tests.support.django_project import Project

MODELS = """
from django.db import models

class Order(models.Model):
    total = models.IntegerField()
"""
MIGRATION = """
from django.db import migrations, models
from relay.django import Migrate

class Migration(migrations.Migration):
    operations = [
        Migrate(),
        migrations.CreateModel(
            "Order", [("id", models.BigAutoField(primary_key=True)), ("total", models.IntegerField())]
        ),
    ]
"""
TESTS = """
import asyncio
from uuid import UUID
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from django.test import override_settings
from relay.consume import FailurePolicy, Inbox, Message, Retries, on
from relay.outbox import Event, NoTransactionError, add
from relay.testing import Harness
from relay.testing.django import OutboxTestCase, OutboxTransactionTestCase, clear_outbox
from shop.models import Order

def place(total):
    with transaction.atomic():
        order = Order.objects.create(total=total)
        add(connection, Event("order", str(order.id), "OrderPlaced", {"total": total}))
    return order

class InATransaction(OutboxTestCase):
    def test_one(self):
        self.outbox.assert_nothing_written()
        order = place(5)
        self.outbox.assert_written("OrderPlaced", key=("order", str(order.id)), payload={"total": 5}, count=1)

    def test_other(self):
        self.test_one()

class Committed(OutboxTransactionTestCase):
    def test_one(self):
        self.outbox.assert_nothing_written()
        place(7)
        self.outbox.assert_written("OrderPlaced", payload={"total": 7}, count=1)

    def test_other(self):
        self.test_one()

    def test_in_a_loop_of_the_test(self):
        place(7)
        outbox = self.outbox
        async def read():
            self.outbox.assert_written("OrderPlaced", count=1)
        with self.assertRaises(SynchronousOnlyOperation):
            asyncio.run(read())
        async def read_taken():
            outbox.assert_written("OrderPlaced", count=1)
        asyncio.run(read_taken())
        async_to_sync(read_taken)()

    def test_a_forgotten_transaction(self):
        with self.assertRaises(NoTransactionError):
            add(connection, Event("order", "1", "OrderPlaced", {}))

@override_settings(OUTBOX_RELAY_SCHEMA="killed")
class AfterAKilledRun(OutboxTestCase):
    @classmethod
    def setUpClass(cls):
        with connection.cursor() as cursor:
            cursor.execute("CREATE SCHEMA killed; CREATE TABLE killed.message AS SELECT 1 AS id")
        super().setUpClass()

    def test_begins_empty(self):
        with connection.cursor() as cursor:
            assert cursor.execute("SELECT FROM killed.message").rowcount == 0

class InALoop(OutboxTestCase):
    async def test_what_another_thread_has_written(self):
        await sync_to_async(place)(5)
        await sync_to_async(self.outbox.assert_written)("OrderPlaced", payload={"total": 5}, count=1)

    async def test_a_transaction_is_one_of_its_thread(self):
        change = lambda: add(connection, Event("order", "1", "OrderPlaced", {}))
        with self.assertRaises(NoTransactionError):
            await sync_to_async(change)()
        await sync_to_async(transaction.atomic(change))()
        await sync_to_async(self.outbox.assert_written)("OrderPlaced", count=1)

@on("OrderPlaced")
def refuse(message: Message, connection):
    if message.aggregate_id == "blocked":
        raise ValueError

class Applied(OutboxTransactionTestCase):
    def test_one(self):
        failures = FailurePolicy(retries=Retries(attempts=3, initial=60, maximum=60))
        harness = Harness([refuse], inbox=Inbox(self.outbox_url, "totals"), failures=failures)
        numbers = {"2": "free", "1": "blocked"}
        events = [Event("order", key, "OrderPlaced", {}, message_id=UUID(int=int(n))) for n, key in numbers.items()]
        delivered = asyncio.run(harness.deliver(*events))
        assert (len(delivered.applied), len(delivered.failed), delivered.duplicates) == (1, 1, 0), delivered

    def test_other(self):
        self.test_one()

FILL = '''
    UPDATE outbox.message SET state = 'parked', parked_at = now(), last_error = 'NO_ROUTE';
    INSERT INTO outbox.pool VALUES ('totals', 'totals', 1);
    INSERT INTO outbox.pool_member (pool, name) VALUES ('totals', 'one');
'''

class Cleared(OutboxTransactionTestCase):
    def filled(self):
        with connection.cursor() as cursor:
            cursor.execute("SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'")
            names = [name for (name,) in cursor.fetchall()]
            return {name for name in names if not cursor.execute(f"SELECT FROM outbox.{name}").rowcount == 0}

    def test_rows_of_messages_go_and_those_of_migrations_stay(self):
        before = self.filled()
        place(5)
        with connection.cursor() as cursor:
            cursor.execute(FILL)
        assert len(self.filled() - before) >= 4, self.filled()
        clear_outbox()
        assert self.filled() == before
"""

ELSEWHERE = """
DATABASES["events"] = {**DATABASES["default"], "NAME": "events"}
OUTBOX_RELAY_DATABASE = "events"
"""
TESTS_ELSEWHERE = """
from django.db import connections, transaction
from relay.outbox import Event, add
from relay.testing.django import OutboxTestCase, OutboxTransactionTestCase

class Written:
    def test_one(self):
        self.outbox.assert_nothing_written()
        with transaction.atomic(using="events"):
            add(connections["events"], Event("order", "1", "OrderPlaced", {}))
        self.outbox.assert_written("OrderPlaced", count=1)

    def test_other(self):
        self.test_one()

    def test_the_outbox_is_not_looked_at(self):
        pass

class InATransaction(Written, OutboxTestCase):
    pass

class Committed(Written, OutboxTransactionTestCase):
    databases = {"default"}

class Everywhere(Written, OutboxTransactionTestCase):
    databases = "__all__"
"""


FILES = {
    "shop/models.py": MODELS,
    "shop/migrations/__init__.py": "",
    "shop/migrations/0001_initial.py": MIGRATION,
    "shop/tests.py": TESTS,
}


@pytest.fixture
def project(server_url: str, tmp_path: Path) -> Project:
    return Project(tmp_path, server_url, FILES)


@pytest.mark.parametrize("parallel", ["1", "2"])
def test_the_tests_of_a_project_have_the_outbox(project: Project, parallel: str) -> None:
    told = project.manage("test", "--parallel", parallel)

    assert "Ran 12 tests" in told
    assert "OK" in told


def test_an_outbox_of_another_database_is_in_its_tests(server_url: str, tmp_path: Path) -> None:
    project = Project(tmp_path, server_url, {**FILES, "shop/tests.py": TESTS_ELSEWHERE}, ELSEWHERE)

    told = project.manage("test")

    assert "Ran 9 tests" in told
    assert "OK" in told


def test_rows_of_a_killed_run_do_not_stay(server_url: str, tmp_path: Path) -> None:
    project = Project(tmp_path, make_conninfo(server_url, dbname="kept"), FILES)
    project.manage("test", "--keepdb", "shop.tests.InATransaction")
    with psycopg.connect(server_url, dbname="test_kept") as connection:
        add(connection, Event("order", "1", "OrderPlaced", {}))

    assert "Ran 6 tests" in project.manage("test", "--keepdb", "shop.tests.InATransaction", "shop.tests.Committed")


def test_a_database_of_relay_migrate_stays_as_it_is(tmp_path: Path, postgres: PostgresServer) -> None:
    url = postgres.create_database("shop")
    try:
        migrate(url)
        project = Project(tmp_path, url, FILES)
        assert "Make the tables of schema outbox, as `relay migrate` does" in project.manage("migrate", "--plan")
        project.manage("migrate")
        project.manage("migrate", "shop", "zero")
        with psycopg.connect(url) as connection:
            Outbox(connection).assert_nothing_written()
    finally:
        postgres.drop_database("shop")
