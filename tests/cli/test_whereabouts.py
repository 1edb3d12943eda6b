"""Which server a command works on: one that was named, and the name is that of the connection."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.testing.servers.process import free_port
from tests.cli.command import Command


@pytest.fixture
def without_port(database_url: str) -> dict[str, str]:
    """Variables of a command whose URL leaves host and port to the environment."""
    parts = {name: str(value) for name, value in conninfo_to_dict(database_url).items()}
    place = {"PGHOST": parts.pop("host"), "PGPORT": parts.pop("port")}
    return {"RELAY_DATABASE_URL": make_conninfo(**parts), **place}


@pytest.mark.parametrize("command", ["migrate", "status", "doctor", "run", "console"])
def test_without_a_url_no_database_is_looked_for(command: str, tmp_path: Path, broker_url: str) -> None:
    refused = Command(tmp_path, RELAY_BROKER_URL=broker_url).process(command)

    assert refused.code == 2, refused
    assert "database.url (RELAY_DATABASE_URL) is not set; it takes postgresql://" in refused.err + refused.out


@pytest.mark.parametrize("command", [("doctor",), ("run",), ("console",), ("dead-letters", "list", "queue")])
def test_without_a_url_no_broker_is_looked_for(command: tuple[str, ...], tmp_path: Path, database_url: str) -> None:
    refused = Command(tmp_path, RELAY_DATABASE_URL=database_url).process(*command)

    assert refused.code == 2, refused
    assert "broker.url (RELAY_BROKER_URL) is not set; it takes amqp://" in refused.err + refused.out


def test_an_inbox_may_be_named_alone(tmp_path: Path) -> None:
    refused = Command(tmp_path)("reconcile", "--since", "1h")

    assert refused.code == 2, refused
    assert "database.url (RELAY_DATABASE_URL) is not set" in refused.err


@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_migrate_names_the_server_that_it_is_connected_to(
    flags: tuple[str, ...], without_port: dict[str, str], tmp_path: Path, database_url: str
) -> None:
    login = urlsplit(database_url)

    done = Command(tmp_path, **without_port)("migrate", *flags)

    assert done.code == 0, done
    assert f"database {login.path[1:]} on {login.hostname}:{login.port}, as user {login.username}\n" in done.err


def test_the_checklist_names_the_server_that_it_is_connected_to(
    without_port: dict[str, str], tmp_path: Path, database_url: str, broker_url: str
) -> None:
    login = urlsplit(database_url)

    told = Command(tmp_path, RELAY_BROKER_URL=broker_url, **without_port)("doctor").out

    assert f"{login.hostname}:{login.port} takes writes" in told
    place = f"{login.hostname}:{login.port}"
    assert f"the relay goes to database {login.path[1:]} on {place}, as user {login.username};" in told


def test_a_server_that_is_away_is_named_as_it_was_looked_for(
    without_port: dict[str, str], tmp_path: Path, broker_url: str
) -> None:
    port = free_port()

    told = Command(tmp_path, RELAY_BROKER_URL=broker_url, **{**without_port, "PGPORT": str(port)})("doctor").out

    assert f"127.0.0.1:{port}: connection " in told
    assert ":5432" not in told
