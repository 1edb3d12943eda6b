"""A Django project has the outbox in its test database, by one operation in a migration, and leaves no rows there."""

from pathlib import Path

import psycopg
import pytest

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
from django.db import connection, transaction
from relay.outbox import Event, NoTransactionError, add
from relay.testing.django import OutboxTestCase, OutboxTransactionTestCase
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

    def test_a_forgotten_transaction(self):
        with self.assertRaises(NoTransactionError):
            add(connection, Event("order", "1", "OrderPlaced", {}))
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

    assert "Ran 5 tests" in told
    assert "OK" in told


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
