"""The command, on a database of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.operate.rows import Rows


@pytest.fixture
def relay(tmp_path: Path, database_url: str) -> Command:
    """`relay` on this test's database."""
    return Command(tmp_path, RELAY_DATABASE_URL=database_url)


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written
