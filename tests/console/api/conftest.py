"""Programs with a token of each role, and a console that they ask."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.api.program import Program, tokens
from tests.console.site import running, users


@pytest.fixture
async def app(settings: Settings, tmp_path: Path) -> AsyncIterator[FastAPI]:
    """A console with users, and with a token of each role."""
    async with running(settings, **users(tmp_path), tokens=str(tmp_path / "tokens")) as app:
        yield app


@pytest.fixture
async def program(app: FastAPI, tmp_path: Path) -> AsyncIterator[Program]:
    """A program that may do everything."""
    async with Program.open(app, tokens(tmp_path)) as opened:
        yield opened.as_(Role.OWNER)
