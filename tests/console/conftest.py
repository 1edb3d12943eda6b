"""A console on this test's servers."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from relay.config.settings import Settings
from tests.console.site import browser, running, users
from tests.operate.rows import Rows


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A browser of a console without authentication."""
    async with running(settings) as app, browser(app) as client:
        yield client


@pytest.fixture
async def guarded(settings: Settings, tmp_path: Path) -> AsyncIterator[FastAPI]:
    """A console with a password file, which has a user of each role."""
    async with running(settings, **users(tmp_path)) as app:
        yield app


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written
