"""Fixtures for the tests of an application; pytest finds them by itself where the distribution is installed.

What they need is imported when a test asks for one: to other test suites this costs nothing.
"""

import os
from collections.abc import Iterator

import pytest

SERVER, BROKER, MANAGEMENT = "outbox_test_server_url", "outbox_test_broker_url", "outbox_test_management_url"
SETTINGS = {
    SERVER: "the PostgreSQL server on which `relay_database` makes databases",
    BROKER: "the RabbitMQ server on which `relay_broker` makes virtual hosts, with an administrator",
    MANAGEMENT: "the server's management plugin; without it, port 15672 of the same host",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, words in SETTINGS.items():
        parser.addini(name, f"{words}; {name.upper()} comes first")


@pytest.fixture
def relay_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of a fresh database with the outbox's tables, which is dropped after the test."""
    from relay.testing.databases import template_database  # noqa: PLC0415

    server = _required(
        request, SERVER, "a PostgreSQL server", "one of its databases. The login needs the right CREATEDB"
    )
    with template_database(server) as database:
        yield database


@pytest.fixture
def relay_broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the AMQP URL of a fresh virtual host, which is deleted after the test."""
    from relay.testing.brokers import virtual_host  # noqa: PLC0415

    server = _required(
        request, BROKER, "a RabbitMQ server with its management plugin", "an administrator, as AMQP has it"
    )
    with virtual_host(server, _setting(request, MANAGEMENT)) as broker:
        yield broker


def _required(request: pytest.FixtureRequest, name: str, what: str, of: str) -> str:
    if (url := _setting(request, name)) is not None:
        return url
    place = f"set {name.upper()}, or {name} in pytest's configuration, to the URL of {of}"
    raise pytest.UsageError(f"{request.fixturename} needs {what}: {place}")


def _setting(request: pytest.FixtureRequest, name: str) -> str | None:
    return os.environ.get(name.upper()) or request.config.getini(name) or None
