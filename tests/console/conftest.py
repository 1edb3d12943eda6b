"""A console on this test's servers."""

from collections.abc import AsyncIterator

import httpx
import pytest

from relay.config.settings import Settings
from relay.console.app import make_app

ORIGIN = "http://127.0.0.1:8420"


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the console without authentication; it keeps no cookies."""
    app = make_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN) as client,
    ):
        yield client
