"""A migrated database with a transaction that is rolled back, and servers for what the kit makes on them."""

from collections.abc import Iterator

import psycopg
import pytest

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.create_database("admin")


@pytest.fixture(scope="session")
def managed() -> Iterator[tuple[RabbitServer, str]]:
    """A broker with the management plugin, and where that is."""
    port = free_port()
    configuration = {"management.tcp.ip": "127.0.0.1", "management.tcp.port": str(port)}
    with RabbitServer(schedulers=1, configuration=configuration, plugins=["rabbitmq_management"]) as server:
        yield server, f"http://127.0.0.1:{port}/"
