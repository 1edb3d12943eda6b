"""A test gets a migrated database that it has alone; the template is made once a server."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.errors import ConfigurationError
from relay.outbox import Event, add
from relay.testing import Outbox, migrate, template_database
from tests.support.postgres import PostgresServer
from tests.testing.suite import run_suite

PAID = Event("Invoice", "42", "InvoicePaid", {"amount": 12.5})
DATABASES = "SELECT datname FROM pg_database WHERE starts_with(datname, 'outbox_') ORDER BY datname"


def databases(server_url: str) -> list[str]:
    with psycopg.connect(server_url) as server:
        return [name for (name,) in server.execute(DATABASES)]


def test_several_at_once_share_one_template(server_url: str) -> None:
    with ExitStack() as using:
        with ThreadPoolExecutor(4) as threads:
            urls = list(threads.map(lambda _: using.enter_context(template_database(server_url)), range(4)))
        for url in urls:
            with psycopg.connect(url) as connection:
                Outbox(connection).assert_nothing_written()
                add(connection, PAID)
        assert len(databases(server_url)) == 5

    (template,) = databases(server_url)
    assert template.startswith("outbox_template_0")


def test_an_old_or_unfinished_template_is_replaced(server_url: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as server:
        for name in (*databases(server_url), "outbox_template_0001_20200101", "outbox_template_unfinished"):
            server.execute(f"DROP DATABASE IF EXISTS {name}".encode())
            server.execute(f"CREATE DATABASE {name}".encode())
        server.execute(f"DROP DATABASE {databases(server_url)[-2]}".encode())

    with template_database(server_url) as url, psycopg.connect(url) as connection:
        add(connection, PAID)

    (template,) = databases(server_url)
    assert "unfinished" not in template


def test_a_connection_that_a_test_left_open_keeps_no_database(server_url: str) -> None:
    with template_database(server_url) as url:
        left_open = psycopg.connect(url)

    assert len(databases(server_url)) == 1
    left_open.close()


@pytest.mark.parametrize("form", ["url", "conninfo"])
def test_the_url_keeps_its_form(server_url: str, form: str) -> None:
    given = server_url if form == "url" else make_conninfo("", **conninfo_to_dict(server_url))
    with template_database(given) as url:
        assert url.startswith("postgresql://") is (form == "url")
        assert {**conninfo_to_dict(url), "dbname": "admin"} == conninfo_to_dict(server_url)


def test_a_url_that_names_its_database_elsewhere_is_refused(server_url: str) -> None:
    before = databases(server_url)
    with pytest.raises(ConfigurationError, match="as its path"), template_database(f"{server_url}?dbname=admin"):
        pass

    assert databases(server_url) == before


def test_tables_are_made_in_the_schema_that_is_asked_for(postgres: PostgresServer) -> None:
    url = postgres.create_database("events")
    try:
        migrate(url, schema="events")
        migrate(url, schema="events")
        with psycopg.connect(url) as connection:
            add(connection, PAID, schema="events")
            assert Outbox(connection, schema="events").all() == [PAID]
    finally:
        postgres.drop_database("events")


SUITE = """
import psycopg
import pytest
from relay.outbox import Event, add
from relay.testing import Outbox

@pytest.mark.parametrize("run", range(4))
def test_each_has_a_database_of_its_own(relay_database, run):
    with psycopg.connect(relay_database) as connection:
        Outbox(connection).assert_nothing_written()
        add(connection, Event("Invoice", "42", "InvoicePaid", {}))
"""


@pytest.mark.parametrize("arguments", [(), ("-n", "2")])
def test_a_suite_gets_databases_by_the_fixture(server_url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_suite(SUITE, tmp_path, server_url, *arguments)

    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert len(databases(server_url)) == 1


def test_the_server_may_stand_in_the_configuration(server_url: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\noutbox_test_server_url = {server_url}\n")

    assert "4 passed" in run_suite(SUITE, tmp_path).stdout


def test_without_a_server_the_fixture_says_how_to_name_one(tmp_path: Path) -> None:
    done = run_suite(SUITE, tmp_path)

    assert "4 errors" in done.stdout
    assert "needs a PostgreSQL server: set OUTBOX_TEST_SERVER_URL, or outbox_test_server_url in" in done.stdout
