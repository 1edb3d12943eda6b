"""One transaction with very many rows: other lanes go on, the memory is bounded, an aborted one leaves no trace."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from relay.config.settings import Settings
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.engine.follower import insert
from tests.faults.victim import Victim
from tests.support.eventually import eventually

MILLION = 1_000_000
PEAK_MIB = 300

KEYS = 5000

# Of the keys below, those in the lane of key 0, or all of them.
WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', key[1 + n % cardinality(key)], 'InvoiceIssued', to_json(repeat('x', {size}))
    FROM generate_series(1, {rows}) AS n, (
        SELECT array_agg(k::text) FROM generate_series(0, {keys} - 1) AS k
        WHERE (hashtextextended('customer/' || k, 0) # hashtextextended('customer/0', 0)) & {lanes} = 0
    ) AS of_lane (key)
"""
ENTRIES_READ = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'message_pending_lane_id'"


def giant(rows: int, *, one_lane: bool, size: int = 10) -> bytes:
    return WRITE.format(rows=rows, keys=KEYS, lanes=15 if one_lane else 0, size=size).encode()


async def test_other_lanes_pass_a_transaction_with_many_rows_in_one_lane(
    outbox: Outbox, writer: psycopg.AsyncConnection, queue: Reader, run_node: RunNode
) -> None:
    """One transaction fills one lane; rows of other lanes pass it."""
    others = await outbox.keys_of_other_lanes()
    async with run_node(max_window_rows=200, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await writer.execute(giant(3000, one_lane=True))
        ids = [await insert(writer, key) for key in others]
        await writer.commit()  # all at once: how far the giant is when the others come does not matter
        await eventually(outbox.is_empty, "everything is sent", 60)

    delivered = await queue.ids(3000 + len(ids))
    assert max(delivered.index(id_) for id_ in ids) < 2500


async def test_an_aborted_transaction_with_many_rows_leaves_nothing_that_slows_the_tail(
    outbox: Outbox, writer: psycopg.AsyncConnection, queue: Reader, run_node: RunNode
) -> None:
    """A large transaction rolls back; the relay passes its dead rows once, and not again for each later row."""
    rows, turns = 200_000, 30
    async with run_node(**NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await writer.execute(giant(rows, one_lane=False))
        during = await outbox.insert()
        await eventually(outbox.is_empty, "rows go on while it is open")
        await writer.rollback()
        after = [await outbox.insert()]
        await eventually(outbox.is_empty, "rows go on when it is undone")
    before = await entries_read(outbox)

    async with run_node(**NO_SWEEP):
        for _ in range(turns):
            after.append(await outbox.insert())
            await eventually(outbox.is_empty, "each is sent")

    # A new session begins at the front and passes the dead rows once, no more.
    assert await entries_read(outbox) - before < 3 * rows
    assert await queue.ids(2 + turns) == [during, *after]


async def entries_read(outbox: Outbox) -> int:
    """Return how many entries of the index were read by sessions that have ended."""
    await eventually(lambda: is_alone(outbox), "the relay's session has ended")
    row = await (await outbox.connection.execute(ENTRIES_READ)).fetchone()
    return int(row[0]) if row else 0


async def is_alone(outbox: Outbox) -> bool:
    cursor = await outbox.connection.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name = 'outbox-relay/log' AND datname = current_database()"
    )
    return await cursor.fetchone() == (0,)


@pytest.fixture
async def relay(settings: Settings, tmp_path: Path) -> AsyncIterator[Victim]:
    """A relay in its own process, whose memory can be measured."""
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": settings.database.url.get_secret_value(),
        "RELAY_BROKER_URL": settings.broker.url.get_secret_value(),
        "RELAY_LOG_FORMAT": "json",
    }
    relay = Victim("relay", [Path(sys.executable).parent / "relay", "run"], environment, "relay.ready", tmp_path)
    await relay.start()
    yield relay
    relay.stop(signal.SIGKILL)


@pytest.mark.drills
@pytest.mark.timeout(600)
@pytest.mark.parametrize("one_lane", [True, False])
async def test_a_million_rows_in_one_transaction_stop_no_other_lane(
    outbox: Outbox, writer: psycopg.AsyncConnection, queue: Reader, relay: Victim, one_lane: bool
) -> None:
    """One transaction writes a million rows; rows of other lanes pass it, and the relay's memory stays bounded."""
    others = await outbox.keys_of_other_lanes()

    async def come_through(turns: int) -> None:
        """Write `turns` rows of other lanes, each as soon as the previous one is sent."""
        for turn in range(turns):
            id_ = await outbox.insert(others[turn % len(others)])
            await eventually(lambda id_=id_: is_sent(outbox, id_), "a row of another lane is sent", 30)

    writing = asyncio.create_task(writer.execute(giant(MILLION, one_lane=one_lane, size=500)))
    while not writing.done():
        await come_through(10)
    await writing
    await writer.commit()

    if one_lane:
        await come_through(200)
        assert not await has_sent(outbox, MILLION)
    await eventually(lambda: has_sent(outbox, 50_000), "the giant's rows go out", 120)

    assert relay.peak_mib() < PEAK_MIB


async def is_sent(outbox: Outbox, id_: int) -> bool:
    cursor = await outbox.connection.execute("SELECT FROM outbox.message_sent WHERE id = %s", [id_])
    return cursor.rowcount == 1


async def has_sent(outbox: Outbox, rows: int) -> bool:
    cursor = await outbox.connection.execute("SELECT count(*) >= %s FROM outbox.message_sent", [rows])
    return await cursor.fetchone() == (True,)
