"""A member that the database does not hear any more, while the broker does: it must not keep its queues from others."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Inbox, WorkPolicy
from relay.consume.pool import Partition, PartitionedConsumer, PoolPolicy
from relay.consume.pool.candidate import Candidate
from tests.consume.effects import QUEUE, Table, count, running
from tests.consume.policies import QUICK
from tests.consume.pool.conftest import candidate
from tests.consume.pool.partitions import Partitions
from tests.support.events import assert_told_once
from tests.support.eventually import eventually
from tests.support.proxied import proxied, with_port
from tests.support.proxy import FaultProxy, Way

KEYS = 50


@pytest.fixture
async def proxy(database: DatabaseSettings) -> AsyncIterator[FaultProxy]:
    """What the one member reaches the database through."""
    async with proxied(database) as (proxy, _):
        yield proxy


@pytest.fixture
def far(inbox: Inbox, database: DatabaseSettings, proxy: FaultProxy) -> Inbox:
    return Inbox(with_port(database, proxy.port), inbox.consumer_name)


def member(name: str, inbox: Inbox, broker: BrokerSettings, **hooks: Any) -> PartitionedConsumer:
    return PartitionedConsumer(
        QUEUE,
        [count],
        inbox=inbox,
        broker=broker,
        pool=PoolPolicy(member=name, **hooks),
        work=WorkPolicy(concurrency=1, backoff=QUICK),
    )


def silence(proxy: FaultProxy) -> None:
    for way in Way:
        proxy.hold(way)


def end_silence(proxy: FaultProxy) -> None:
    proxy.cut()
    for way in Way:
        proxy.release(way)


async def has(table: Table, number: int) -> bool:
    return len(await table.numbers()) >= number


async def test_its_partitions_go_on_with_another(
    inbox: Inbox,
    far: Inbox,
    proxy: FaultProxy,
    broker: BrokerSettings,
    partitions: Partitions,
    table: Table,
    master: Candidate,
) -> None:
    cut_off, other = member("a", far, broker), member("b", inbox, broker)
    async with running(cut_off), running(other):
        await eventually(lambda: [len(each.partitions) for each in (cut_off, other)] == [8, 8], "they share")

        silence(proxy)
        try:
            await partitions.send(range(500), keys=KEYS)
            await eventually(lambda: has(table, 500), "the other applies all", within=30)
        finally:
            end_silence(proxy)
        await eventually(lambda: [len(each.partitions) for each in (cut_off, other)] == [8, 8], "they share again")

    for key in range(KEYS):
        assert await table.numbers(f"key-{key}") == list(range(key, 500, KEYS))
    assert cut_off.counters.applied == 0


async def test_it_takes_its_partitions_up_again_when_nobody_got_them(
    inbox: Inbox, far: Inbox, proxy: FaultProxy, broker: BrokerSettings, partitions: Partitions, table: Table
) -> None:
    loaded: list[int] = []

    def load(partition: Partition) -> None:
        loaded.append(partition.number)

    cut_off = member("a", far, broker, on_assigned=load)
    with capture_logs() as events:
        async with running(cut_off):
            async with candidate(inbox.database, "gone before"):
                await eventually(lambda: len(cut_off.partitions) == 16, "it has all")

            silence(proxy)
            try:
                await partitions.send(range(100), keys=KEYS)
                await eventually(lambda: is_left(partitions), "the queues are left to others", within=30)
            finally:
                end_silence(proxy)
            await eventually(lambda: has(table, 100), "it applies all", within=30)
            await eventually(lambda: "database" not in cut_off.hindrances(), "it is well")

    assert_told_once(events, "database")
    for key in range(KEYS):
        assert await table.numbers(f"key-{key}") == list(range(key, 100, KEYS))
    assert len(loaded) <= 2 * 16  # each once, and again after a transaction that was cut


async def test_it_ends_when_it_is_told_to_stop_without_a_database(
    far: Inbox, proxy: FaultProxy, broker: BrokerSettings, partitions: Partitions, table: Table, master: Candidate
) -> None:
    cut_off = member("a", far, broker)
    running = asyncio.create_task(cut_off.run(signals=False))
    await eventually(lambda: len(cut_off.partitions) == 16, "it has all")

    proxy.refusing = True
    proxy.cut()
    await partitions.send(range(100), keys=KEYS)
    cut_off.stop()
    await asyncio.wait_for(running, 30)

    assert await table.numbers() == []
    await eventually(lambda: is_left(partitions), "the messages are left to others")


async def is_left(partitions: Partitions) -> bool:
    return await partitions.ready_count() == 100
