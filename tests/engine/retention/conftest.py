"""Days of sent rows that are old, a reader that keeps them, and one round of the retention."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.retention import drop
from relay.retention.kind import SENT, Kind
from relay.retention.rounds import drop_old_days
from relay.settings import DatabaseSettings
from tests.support.days import Days

KEEP = 14  # days
OLD = KEEP + 1  # days ago: it ended KEEP days ago
READ_ALL = "SELECT count(*) FROM outbox.message"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop, "LOCK_TIMEOUT", 0.3)


@pytest.fixture
def days(database_url: str) -> Iterator[Days]:
    days = Days(database_url)
    with days.connection:
        yield days


@pytest.fixture
async def reader(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A long report: a snapshot that has read every day and stays open."""
    async with await psycopg.AsyncConnection.connect(database_url, application_name="report") as connection:
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await connection.execute(READ_ALL)
        yield connection


async def round_of(database: DatabaseSettings, keep: int = KEEP, kind: Kind = SENT) -> list[Any]:
    """Run one round and give its events."""
    with capture_logs() as events:
        await drop_old_days(database, {kind: keep})
    return events
