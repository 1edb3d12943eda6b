"""A console on this test's servers."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from playwright.async_api import Browser, async_playwright

from relay.config.settings import Settings
from relay.console import failure_groups
from tests.console.site import browser, running, users
from tests.console.windows import CHROMIUM
from tests.http.conftest import rows, start_relay

__all__ = ["rows", "start_relay"]  # fixtures


@pytest.fixture(autouse=True)
def counts_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page waits for its count of failures, however busy the machine is."""
    monkeypatch.setattr(failure_groups, "PATIENCE", 60.0)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A browser of a console without authentication, which has brought the token of its start."""
    async with running(settings) as app, browser(app) as client:
        yield client


@pytest.fixture
async def guarded(settings: Settings, tmp_path: Path) -> AsyncIterator[FastAPI]:
    """A console with a password file, which has a user of each role."""
    async with running(settings, **users(tmp_path)) as app:
        yield app


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        await started.close()
