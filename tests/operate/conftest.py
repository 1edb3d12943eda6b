"""Rows for the tests of what an operator does."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.operate.session import session
from relay.servers.postgres.tables import Tables
from tests.cli.command import Command
from tests.operate.inboxes import Ends
from tests.operate.rows import Rows


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written


@pytest.fixture
def tables(database: DatabaseSettings) -> Iterator[Tables]:
    """Its tables, in an operator's session."""
    with session(database) as opened:
        yield opened


@pytest.fixture
def connection(tables: Tables) -> psycopg.Connection:
    """The connection of that session."""
    return tables.connection


@pytest.fixture
def ends(database: DatabaseSettings, inbox_url: str) -> Iterator[Ends]:
    """What was sent, in this test's database, and what was applied, in another one."""
    both = Ends(database, DatabaseSettings(url=SecretStr(inbox_url)))
    yield both
    both.close()


@pytest.fixture
def relay(tmp_path: Path, database_url: str) -> Command:
    """`relay` on this test's database."""
    return Command(tmp_path, RELAY_DATABASE_URL=database_url)
