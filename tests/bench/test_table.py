"""The benchmark of the table's state measures what it says: retained rows, dead rows, the relay's memory."""

import asyncio
import os

import psycopg
import pytest

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Backlog, Keys
from bench.frame.error import BenchmarkError
from bench.frame.processes import peak_bytes
from bench.frame.servers import Servers, holding_snapshot, require_space, second_database
from bench.table import (
    DAYS,
    ROWS_TO_TAKE,
    SHARES,
    measure_memory,
    measure_retained,
    measure_snapshot,
    measure_take_over,
    memory_after,
    retain,
)
from relay.testing.servers.process import resident_bytes
from tests.bench.conftest import Forget

ROWS = 500
RETAINED = 5000

OF_A_DAY = "SELECT sent_at::date, count(*), max(octet_length(payload::text)) FROM outbox.message_sent GROUP BY 1"
SENT = "SELECT count(*) FROM outbox.message_sent"
TRANSACTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'old snapshot' AND backend_xmin IS NOT NULL"
)


@pytest.fixture
def backlog(servers: Servers) -> Backlog:
    return table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows=ROWS)


def test_retained_rows_lie_in_ten_days_until_now(servers: Servers) -> None:
    retain(servers, RETAINED)

    with psycopg.connect(servers.database_url) as connection:
        days = connection.execute(OF_A_DAY).fetchall()
    assert len(days) == DAYS
    assert sum(rows for _, rows, _ in days) == RETAINED
    assert {longest for _, _, longest in days} == {table.PAYLOAD_BYTES}


def test_the_drain_of_a_full_table_keeps_what_is_retained(servers: Servers, backlog: Backlog) -> None:
    with second_database(servers, f"{servers.folder.name}_full".lower()) as filled:
        retain(filled, RETAINED)

        kept = measure_retained(filled, backlog, RETAINED, is_retained=True)
        without = measure_retained(servers, backlog, RETAINED, is_retained=False)

        assert (kept["lost"], without["lost"]) == (0, 0)
        assert count(filled, SENT) == RETAINED + ROWS
    assert count(servers, SENT) == ROWS


@pytest.mark.drills
def test_dead_rows_are_there_only_under_a_snapshot(servers: Servers, backlog: Backlog) -> None:
    """A backlog is drained with a held snapshot and without one; only the snapshot keeps dead rows."""
    held = measure_snapshot(servers, backlog, is_held=True)
    free = measure_snapshot(servers, backlog, is_held=False)

    assert (held["lost"], free["lost"]) == (0, 0)
    assert held["dead_mib"] * 2**20 > ROWS * table.PAYLOAD_BYTES > free["dead_mib"] * 2**20


def test_a_relay_takes_over_behind_dead_rows(servers: Servers) -> None:
    assert measure_take_over(servers, ROWS)["seconds"] > 0
    assert count(servers, SENT) == 2 * ROWS_TO_TAKE


def test_a_snapshot_is_held_until_the_end_of_its_block(servers: Servers) -> None:
    with holding_snapshot(servers.database_url):
        meanwhile = count(servers, TRANSACTIONS)

    assert meanwhile == 1
    assert count(servers, TRANSACTIONS) == 0


def test_the_memory_is_looked_at_in_the_course_of_a_drain(servers: Servers) -> None:
    memory = measure_memory(servers, ROWS)

    assert memory["lost"] == 0
    assert queue.depth(servers.broker_url) == ROWS
    assert memory["looks"] >= 2
    seen = max(memory["idle"], *(memory[f"after {share:.0%}"] for share in SHARES))
    assert 20 < seen <= memory["peak"] + 1 < 300  # MiB; Linux counts both, each a little late


def test_the_memory_is_told_by_what_was_published() -> None:
    looks = [(0, 1.0), (9, 2.0), (10, 3.0), (60, 4.0), (60, 5.0)]

    assert [memory_after(looks, rows) for rows in (0, 10, 50, 90)] == [1.0, 3.0, 4.0, 5.0]


def test_a_process_holds_no_more_than_it_did_at_most() -> None:
    now = resident_bytes(os.getpid())

    assert 0 < now <= peak_bytes(os.getpid())


async def test_a_message_that_does_not_arrive_is_lost(
    servers: Servers, backlog: Backlog, forget_all_but: Forget
) -> None:
    await forget_all_but(ROWS - 10)

    memory = await asyncio.to_thread(measure_memory, servers, ROWS)
    retained = await asyncio.to_thread(measure_retained, servers, backlog, RETAINED, is_retained=False)

    assert (memory["lost"], retained["lost"]) == (10, 10)
    with pytest.raises(BenchmarkError, match="10 were lost"):
        await asyncio.to_thread(measure_snapshot, servers, backlog, is_held=False)


def test_a_disk_without_room_ends_the_benchmark(servers: Servers) -> None:
    with pytest.raises(BenchmarkError, match="ask for fewer rows"):
        require_space(servers.folder, 1 << 60)


def count(servers: Servers, query: str) -> int:
    with psycopg.connect(servers.database_url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])
