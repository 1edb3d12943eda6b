"""The fixture of docs/testing.md for pytest-django gives each test an empty outbox, also in the next run."""

import os
import subprocess
from pathlib import Path

import pytest

from relay.testing.servers.postgres import PostgresServer
from tests.installs.conftest import Install
from tests.support.django_project import Project

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]

FIXTURE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text().split("```python\n")[-1].partition("```")[0]
MIGRATION = """
from django.db import migrations
from relay.django import Migrate

class Migration(migrations.Migration):
    operations = [Migrate()]
"""
TESTS = """
import pytest
from django.db import connection, transaction
from relay.outbox import Event, add
from relay.testing.django import OutboxTestCase, OutboxTransactionTestCase

def place():
    with transaction.atomic():
        add(connection, Event("order", "1", "OrderPlaced", {}))

def place_one(outbox):
    outbox.assert_nothing_written()
    place()
    outbox.assert_written("OrderPlaced", count=1)

def test_an_event_is_rolled_back(outbox):
    place_one(outbox)

@pytest.mark.django_db(transaction=True)
def test_an_event_is_committed(outbox):
    place_one(outbox)

@pytest.mark.django_db(transaction=True)
def test_another_event_is_committed(outbox):
    place_one(outbox)

class InATransaction(OutboxTestCase):
    def test_an_event(self):
        place_one(self.outbox)

class Committed(OutboxTransactionTestCase):
    def test_an_event(self):
        place_one(self.outbox)

@pytest.mark.django_db(transaction=True)
def test_an_event_is_left():
    place()
"""


def test_the_fixture_for_pytest_django(install: Install, postgres: PostgresServer, tmp_path: Path) -> None:
    python = install("newest", "django", beside=("psycopg[binary]", "pytest-django"))
    files = {
        "shop/migrations/__init__.py": "",
        "shop/migrations/0001_outbox.py": MIGRATION,
        "conftest.py": FIXTURE,
        "test_shop.py": TESTS,
        "pytest.ini": "[pytest]\nDJANGO_SETTINGS_MODULE = project\npythonpath = .\n",
    }
    project = Project(tmp_path / "project", postgres.admin_url, files)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    for _ in range(2):
        done = subprocess.run(
            [python, "-m", "pytest", "--reuse-db"],
            cwd=project.folder,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "6 passed" in done.stdout, done.stdout + done.stderr
