"""A relay that waits a moment for another one, which moves rows of the same route, is ready all the time."""

import asyncio
import time

import psycopg
import pytest

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read.tail import Tail
from relay.engine.session.database_retry import DatabaseRetry
from relay.engine.session.session import LaneSession
from relay.engine.settle.put_away import ClosedError, PutAway
from relay.runtime.health import Health
from tests.engine.follower import IN_ORDER

ROUTE = "INSERT INTO outbox.quarantine (exchange, routing_key, reason) VALUES ('', 'later', 'nothing is bound')"
LOCK_ROUTE = "SELECT FROM outbox.quarantine FOR UPDATE"
LOCK_TABLE = "LOCK TABLE outbox.quarantine IN ACCESS EXCLUSIVE MODE"


async def reasons_after_two_tries(database: DatabaseSettings, writer: psycopg.AsyncConnection, lock: str) -> list[int]:
    """Return how many reasons the health report had after each of two tries that met this lock of another session."""
    await writer.execute(ROUTE)
    await writer.commit()
    await writer.execute(lock.encode())
    health, found = Health(), []
    async with await LaneSession.open(database) as session:
        session.lanes.take(await lock_lanes(session))
        retry = DatabaseRetry(session, health, drain=asyncio.Event())
        way = PutAway(session, Tail(session, RelaySettings(), IN_ORDER, retry), retry)
        for _ in range(2):
            with pytest.raises(ClosedError):
                async with way.transaction() as connection:
                    await connection.execute(LOCK_ROUTE)
            found.append(len(health.reasons))
            await asyncio.sleep(max(0.0, way._opens_at - time.monotonic()))
    return found


async def test_the_first_wait_for_a_row_is_no_reason(
    database: DatabaseSettings, writer: psycopg.AsyncConnection
) -> None:
    assert await reasons_after_two_tries(database, writer, LOCK_ROUTE) == [0, 1]


async def test_a_locked_table_is_a_reason_at_once(database: DatabaseSettings, writer: psycopg.AsyncConnection) -> None:
    assert await reasons_after_two_tries(database, writer, LOCK_TABLE) == [1, 1]
