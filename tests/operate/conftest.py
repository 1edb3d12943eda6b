"""Rows for the tests of what an operator does."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.operate.session import session
from tests.cli.command import Command
from tests.operate.inboxes import Ends
from tests.operate.rows import Rows
from tests.support.log import use_log


@pytest.fixture(autouse=True)
def storage(request: pytest.FixtureRequest) -> str:
    """Where new and sent rows lie: in `days`, unless a test asks for the `log`."""
    return str(getattr(request, "param", "days"))


@pytest.fixture
def rows(database_url: str, storage: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    if storage == "log":
        use_log(written.connection)
    with written.connection:
        yield written


@pytest.fixture
def connection(database: DatabaseSettings) -> Iterator[psycopg.Connection]:
    """An operator's session in it."""
    with session(database) as opened:
        yield opened


@pytest.fixture
def ends(database: DatabaseSettings, inbox_url: str, storage: str) -> Iterator[Ends]:
    """What was sent, in this test's database, and what was applied, in another one."""
    both = Ends(database, DatabaseSettings(url=SecretStr(inbox_url)), is_logged=storage == "log")
    yield both
    both.close()


@pytest.fixture
def relay(tmp_path: Path, database_url: str) -> Command:
    """`relay` on this test's database."""
    return Command(tmp_path, RELAY_DATABASE_URL=database_url)
