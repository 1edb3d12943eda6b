"""`Migrate` makes the outbox's tables as the role that Django has, and does not wait for its own transaction."""

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.operate.packaged import roles
from relay.testing import migrate
from relay.testing.servers.postgres import PostgresServer
from tests.support.django_project import Project

MIGRATION = """
from django.db import migrations
from relay.django import Migrate

class Migration(migrations.Migration):
    operations = [{before}Migrate()]
"""
LOGIN = "CREATE ROLE deploying LOGIN PASSWORD 'opensesame'"


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    """A database without tables."""
    yield postgres.create_database("migrated")
    postgres.drop_database("migrated")


@pytest.fixture
def deploying(url: str) -> Iterator[str]:
    """The URL of a login without rights."""
    with psycopg.connect(url) as owner:
        owner.execute(LOGIN)
    yield make_conninfo(url, user="deploying", password="opensesame")
    with psycopg.connect(url) as owner:
        owner.execute("DROP OWNED BY deploying; DROP ROLE deploying")


def project_of(folder: Path, url: str, *, before: str = "", settings: str = "") -> Project:
    files = {"shop/migrations/__init__.py": "", "shop/migrations/0001_outbox.py": MIGRATION.format(before=before)}
    return Project(folder, url, files, settings)


def test_the_tables_belong_to_the_role_that_django_assumes(tmp_path: Path, url: str, deploying: str) -> None:
    with psycopg.connect(url) as owner:
        owner.execute('CREATE ROLE "table owner"; GRANT "table owner" TO deploying')
        owner.execute('GRANT ALL ON DATABASE migrated TO "table owner"; GRANT ALL ON SCHEMA public TO "table owner"')
    options = "DATABASES['default']['OPTIONS'] = {'assume_role': 'table owner', 'options': '-c statement_timeout=1min'}"

    project_of(tmp_path, deploying, settings=options).manage("migrate")

    with psycopg.connect(url) as owner:
        found = owner.execute("SELECT tableowner FROM pg_tables WHERE tablename = 'message'").fetchone()
        owner.execute('DROP OWNED BY "table owner"; DROP ROLE "table owner"')
    assert found == ("table owner",)


def test_a_schema_of_the_same_transaction_is_refused_at_once(tmp_path: Path, url: str) -> None:
    project = project_of(tmp_path, url, before="migrations.RunSQL('CREATE SCHEMA outbox'), ")

    begun = time.monotonic()
    told = project.manage("migrate", code=1)

    assert time.monotonic() - begun < 50  # a migration tries for 60 s to get its locks
    assert "the transaction of this migration has made schema outbox, and Migrate() works by another" in told
    assert "put Migrate() into a separate migration" in told


@pytest.mark.drills
def test_a_lock_of_the_same_transaction_is_told_as_its_own(tmp_path: Path, url: str) -> None:
    """An operation before `Migrate` locks what `Migrate` changes."""
    with psycopg.connect(url) as owner:
        owner.execute("CREATE SCHEMA outbox")
    making = "migrations.RunSQL('CREATE TABLE outbox.migration (version_num varchar(32) PRIMARY KEY)'), "

    told = project_of(tmp_path, url, before=making).manage("migrate", code=1)

    assert "ConfigurationError: the transaction of this migration holds a lock that it needs" in told


def test_tables_that_are_there_are_left_to_their_owner(tmp_path: Path, url: str, deploying: str) -> None:
    migrate(url)
    with psycopg.connect(url) as owner:
        owner.execute(roles("outbox").encode())
        owner.execute("GRANT outbox_writer TO deploying; GRANT ALL ON SCHEMA public TO deploying")
    project = project_of(tmp_path, deploying)

    project.manage("migrate")

    with psycopg.connect(url) as owner:
        owner.execute("ALTER TABLE outbox.message RENAME COLUMN trace_context TO later")
    project.manage("migrate", "--fake", "shop", "zero")
    assert "run it as the role that owns the tables" in project.manage("migrate", code=1)
