"""A migrated database a module, emptied for each test, and what is in it."""

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from relay.testing.servers.postgres import PostgresServer
from tests.support.template import template_of

READ = """
    SELECT message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type,
           payload::text AS payload, payload_bytes, available_at, trace_context, state, attempts
    FROM outbox.message
    WHERE event_type <> 'Filler'
    ORDER BY id
"""


class MessageTable:
    """`outbox.message`, as others see it: committed rows only."""

    def __init__(self, connection: psycopg.Connection[dict[str, Any]]) -> None:
        self._connection = connection

    def rows(self) -> list[dict[str, Any]]:
        return self._connection.execute(READ).fetchall()

    def row(self) -> dict[str, Any]:
        (row,) = self.rows()
        return row

    def execute(self, statement: str) -> list[dict[str, Any]]:
        return self._connection.execute(statement.encode()).fetchall()


@pytest.fixture(scope="module")
def module_url(postgres: PostgresServer) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    url = postgres.create_database(name, template=template_of(postgres))
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE invoice (id text)")
    yield url
    postgres.drop_database(name)


@pytest.fixture(scope="module")
def module_connection(module_url: str) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    with psycopg.connect(module_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def table(module_connection: psycopg.Connection[dict[str, Any]]) -> MessageTable:
    module_connection.execute("TRUNCATE outbox.message, invoice")
    return MessageTable(module_connection)
