"""The benchmark of the replay measures what it says: everything that is sent arrives, and a loss is seen."""

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Keys
from bench.frame.error import BenchmarkError
from bench.frame.servers import Servers
from bench.frame.watched_relay import WatchedRelay, watched_relay
from bench.replay import measure_beside, measure_memory, measure_rates, running_replay, wait_ended
from tests.bench.conftest import Forget

ROWS = 500


@pytest.fixture
def watched(servers: Servers) -> Iterator[WatchedRelay]:
    with watched_relay(servers) as watched:
        yield watched


def test_a_backlog_is_drained_and_all_of_it_is_replayed(servers: Servers) -> None:
    backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows=ROWS)

    drained, replay = measure_rates(servers, backlog)

    assert (drained["lost"], replay["lost"]) == (0, 0)
    assert min(drained["rate"], replay["rate"], replay["postgres_cpu"]) > 0
    assert replayed(servers) == queue.depth(servers.broker_url) == ROWS


def test_live_traffic_is_measured_beside_a_replay_and_alone(servers: Servers, watched: WatchedRelay) -> None:
    alone = measure_beside(watched, 100, 1, rows=ROWS, is_beside=False)
    beside = measure_beside(watched, 100, 1, rows=ROWS, is_beside=True)

    assert (alone["lost"], beside["lost"]) == (0, 0)
    assert alone["replayed"] == 0
    assert beside["replayed"] == replayed(servers)
    assert min(alone["confirmed"], beside["confirmed"]) >= 100


async def test_a_message_that_does_not_arrive_is_lost(servers: Servers, forget_all_but: Forget) -> None:
    backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows=ROWS)
    await forget_all_but(ROWS - 10)

    drained, replay = await asyncio.to_thread(measure_rates, servers, backlog)

    assert (drained["lost"], replay["lost"]) == (10, 10)


def test_the_memory_is_that_of_the_replay_s_process(servers: Servers) -> None:
    memory = measure_memory(servers, ROWS)

    assert 20 < memory["peak"] < 300  # MiB
    assert replayed(servers) == ROWS


def test_a_replay_that_fails_ends_the_benchmark(servers: Servers) -> None:
    with psycopg.connect(servers.database_url) as connection:
        connection.execute("DROP TABLE outbox.job CASCADE")

    with running_replay(servers) as replaying, pytest.raises(BenchmarkError, match="ended with code 1"):
        wait_ended(replaying)


def replayed(servers: Servers) -> int:
    with psycopg.connect(servers.database_url) as connection:
        row = connection.execute("SELECT done FROM outbox.job ORDER BY id DESC").fetchone()
    assert row is not None
    return int(row[0])
