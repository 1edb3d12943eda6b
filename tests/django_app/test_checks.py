"""`manage.py check` names what keeps a Django project from writing events, and the remedy."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.operate.packaged import roles
from relay.testing import migrate
from relay.testing.servers.postgres import PostgresServer
from tests.support.django_project import Project

APP = """
INSTALLED_APPS = ["relay.django"]
"""
ADMIN = """
INSTALLED_APPS = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
                  "django.contrib.messages", "django.contrib.sessions", "relay.django"]
SILENCED_SYSTEM_CHECKS = ["admin.E403", "admin.E408", "admin.E409", "admin.E410"]
"""
SQLITE = """
DATABASES["notes"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
"""
FAIL = ("--fail-level", "INFO")
DATABASE = ("--database", "default", *FAIL)


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    """A database without tables."""
    yield postgres.create_database("checked")
    postgres.drop_database("checked")


@pytest.fixture
def writer(url: str, postgres: PostgresServer) -> Iterator[str]:
    """The URL of a login that has no rights, in the database with its tables and roles."""
    migrate(url)
    with psycopg.connect(url) as owner:
        owner.execute(roles("outbox").encode())
        owner.execute("CREATE ROLE checked_app LOGIN PASSWORD 'opensesame'")
    yield make_conninfo(url, user="checked_app", password="opensesame")
    with psycopg.connect(url) as owner:
        owner.execute("DROP OWNED BY checked_app; DROP ROLE checked_app")


def test_without_a_database_only_the_settings_are_checked(tmp_path: Path) -> None:
    nowhere = Project(tmp_path, "postgresql://nobody@127.0.0.1:1/shop", {}, APP)

    assert "no issues" in nowhere.manage("check", *FAIL)
    assert "(outbox_relay.W001) The outbox of database 'default' cannot be checked" in nowhere.manage(
        "check", *DATABASE, code=1
    )


def test_a_database_that_is_not_postgresql_is_refused(tmp_path: Path, url: str) -> None:
    project = Project(tmp_path, url, {}, f"{APP}{SQLITE}OUTBOX_RELAY_DATABASE = 'notes'\n")

    told = project.manage("check", code=1)
    assert "(outbox_relay.E002) Database 'notes' is SQLite: the outbox needs PostgreSQL" in told


def test_a_database_that_is_not_listed_is_refused(tmp_path: Path, url: str) -> None:
    project = Project(tmp_path, url, {}, f"{APP}OUTBOX_RELAY_DATABASE = 'events'\n")

    told = project.manage("check", code=1)
    assert "(outbox_relay.E001) OUTBOX_RELAY_DATABASE is 'events', which DATABASES does not have." in told
    assert "HINT: Take one of default." in told


def test_missing_tables_warn_and_let_the_migration_make_them(tmp_path: Path, url: str) -> None:
    migration = """
from django.db import migrations
from relay.django import Migrate

class Migration(migrations.Migration):
    operations = [Migrate()]
"""
    files = {"shop/migrations/__init__.py": "", "shop/migrations/0001_outbox.py": migration}
    settings = f"{APP}{SQLITE}INSTALLED_APPS += ['shop']\nOUTBOX_RELAY_SCHEMA = 'events'\n"
    project = Project(tmp_path, url, files, settings)
    assert "(outbox_relay.W002) Database 'default' has no outbox in schema 'events'." in project.manage(
        "check", *DATABASE, code=1
    )

    project.manage("migrate", "--database", "notes", "shop")  # which has no outbox
    project.manage("migrate", "shop")

    assert "no issues" in project.manage("check", *DATABASE)


def test_tables_of_another_release_are_told(tmp_path: Path, url: str) -> None:
    migrate(url)
    project = Project(tmp_path, url, {}, APP)
    with psycopg.connect(url) as owner:
        owner.execute("ALTER TABLE outbox.message RENAME COLUMN trace_context TO later")
    told = project.manage("check", *DATABASE, code=1)
    assert "(outbox_relay.W004)" in told
    assert "it lacks trace_context" in told

    with psycopg.connect(url) as owner:
        owner.execute("COMMENT ON TABLE outbox.migration IS 'oldest release that runs on these tables: 99.0.0'")
    told = project.manage("check", *DATABASE, code=1)
    assert "(outbox_relay.W003) The outbox of database 'default' needs release 99.0.0" in told


def test_missing_rights_are_told_with_the_grants_that_repair_them(tmp_path: Path, url: str, writer: str) -> None:
    project = Project(tmp_path, writer, {}, ADMIN)

    told = project.manage("check", *DATABASE, code=1)
    assert "(outbox_relay.W005) Login 'checked_app' of database 'default' may not write events" in told
    with psycopg.connect(url) as owner:
        owner.execute(grant_of(told))

    for part in ("SCHEMA outbox", "SEQUENCE outbox.message_id_seq"):
        with psycopg.connect(url) as owner:
            owner.execute(f"REVOKE USAGE ON {part} FROM outbox_writer".encode())
        assert "(outbox_relay.W005)" in project.manage("check", *DATABASE, code=1)
        with psycopg.connect(url) as owner:
            owner.execute(f"GRANT USAGE ON {part} TO outbox_writer".encode())

    told = project.manage("check", *DATABASE, code=1)
    assert "(outbox_relay.I001) Login 'checked_app' of database 'default' may not read messages" in told
    with psycopg.connect(url) as owner:
        owner.execute(grant_of(told))

    assert "no issues" in project.manage("check", *DATABASE)
    for table in ("message", "message_state"):
        with psycopg.connect(url) as owner:
            owner.execute(f"REVOKE SELECT ON outbox.{table} FROM checked_app".encode())
        assert "(outbox_relay.I001)" in project.manage("check", *DATABASE, code=1)
        with psycopg.connect(url) as owner:
            owner.execute(grant_of(told))


def grant_of(told: str) -> bytes:
    return ("GRANT" + told.partition("GRANT")[2].partition(".\n")[0]).encode()
