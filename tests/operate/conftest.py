"""Rows for the tests of what an operator does."""

from collections.abc import Iterator

import psycopg
import pytest

from relay.operate.session import session
from relay.settings import DatabaseSettings
from tests.operate.rows import Rows


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written


@pytest.fixture
def connection(database: DatabaseSettings) -> Iterator[psycopg.Connection]:
    """An operator's session in it."""
    with session(database) as opened:
        yield opened
