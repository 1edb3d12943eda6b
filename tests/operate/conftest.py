"""Rows for the tests of what an operator does."""

from collections.abc import Iterator

import pytest

from tests.operate.rows import Rows


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written
