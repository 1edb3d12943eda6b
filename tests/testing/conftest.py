"""A migrated database with a transaction that is rolled back, and a server for databases of the kit's own."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.support.postgres import PostgresServer


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.create_database("admin")
