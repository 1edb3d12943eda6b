"""Days of sent rows that are old, a reader that keeps them, and one round of the retention."""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings
from relay.retention.kind import SENT, DatedTable
from relay.retention.rounds import drop_old_days
from tests.support.days import Days
from tests.support.eventually import eventually

KEEP = 14  # days
OLD = KEEP + 1  # days ago: it ended KEEP days ago
READ_ALL = "SELECT count(*) FROM outbox.message"
SECONDS_OF_A_DAY = 86_400
LONGEST_TEST = 20  # seconds
SESSIONS = """
    SELECT pid FROM pg_stat_activity
    WHERE application_name = 'outbox-relay retention' AND datname = current_database()
"""
LOCKS = """
    SELECT count(*) FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@pytest.fixture(autouse=True)
def one_day() -> None:
    """Begin no test shortly before midnight: each counts days, by UTC."""
    left = SECONDS_OF_A_DAY - time.time() % SECONDS_OF_A_DAY
    if left < LONGEST_TEST:
        time.sleep(left + 1)


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


async def round_of(database: DatabaseSettings, keep: int = KEEP, kind: DatedTable = SENT) -> list[Any]:
    """Run one round and give its events; its lock is free then."""
    async with await psycopg.AsyncConnection.connect(database.url.get_secret_value(), autocommit=True) as connection:
        others = await sessions(connection)
        with capture_logs() as events:
            await drop_old_days(database, {kind: keep})

        async def has_ended() -> bool:
            return await sessions(connection) <= others

        await eventually(has_ended, "the server has ended the round's session")
    return events


async def sessions(connection: psycopg.AsyncConnection) -> set[int]:
    """Return the server processes of retention."""
    return {pid for (pid,) in await (await connection.execute(SESSIONS)).fetchall()}


async def lock_is_free(days: Days) -> None:
    """Wait until the server has ended the session of the last round, and with it its lock."""
    await eventually(lambda: days.value(LOCKS) == 0, "the lock is free")
