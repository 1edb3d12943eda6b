"""Fixtures for the tests of an application; pytest finds them by itself where the distribution is installed.

What they need is imported when a test asks for one: to other test suites this costs nothing.
"""

import os
from collections.abc import Iterator

import pytest

VARIABLE, SETTING = "OUTBOX_TEST_SERVER_URL", "outbox_test_server_url"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(SETTING, f"the PostgreSQL server on which `relay_database` makes databases; {VARIABLE} comes first")


@pytest.fixture
def relay_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of a fresh database with the outbox's tables, which is dropped after the test."""
    from relay.testing.databases import template_database  # noqa: PLC0415

    url = os.environ.get(VARIABLE) or request.config.getini(SETTING)
    if not url:
        raise pytest.UsageError(
            f"relay_database needs a PostgreSQL server: set {VARIABLE}, or {SETTING} in pytest's configuration, to the "
            "URL of one of its databases. The login needs the right CREATEDB"
        )
    with template_database(url) as database:
        yield database
