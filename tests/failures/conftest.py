"""Rows, an operator's session and the `relay` command on the database of a test."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.session import session
from tests.cli.command import Command
from tests.operate.rows import Rows


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    written = Rows(database_url)
    with written.connection:
        yield written


@pytest.fixture
def connection(database: DatabaseSettings) -> Iterator[psycopg.Connection]:
    with session(database) as opened:
        yield opened


@pytest.fixture
def relay(tmp_path: Path, database_url: str) -> Command:
    return Command(tmp_path, RELAY_DATABASE_URL=database_url)
