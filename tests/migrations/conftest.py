"""A database without tables, and one of our own with them."""

import secrets
from collections.abc import Iterator

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.testing.servers.postgres import PostgresServer

Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def empty_database(postgres: PostgresServer) -> Iterator[DatabaseSettings]:
    name = f"test_{secrets.token_hex(6)}"
    yield DatabaseSettings(url=SecretStr(postgres.create_database(name)))
    postgres.drop_database(name)


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def other_connection(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def url_of(database: DatabaseSettings) -> str:
    return database.url.get_secret_value()
