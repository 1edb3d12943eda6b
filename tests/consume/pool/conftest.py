"""The partitions of one test, and a master in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume.failed.queues import pool_topology, prepare
from relay.consume.pool.candidate import Candidate
from tests.consume.effects import CONSUMER, QUEUE
from tests.consume.pool.partitions import Partitions


@pytest.fixture
async def partitions(broker_url: str, broker: BrokerSettings) -> AsyncIterator[Partitions]:
    await prepare(broker, CONSUMER, pool_topology(QUEUE), may_declare=True)
    async with await aio_pika.connect(broker_url) as connection:
        yield Partitions(await connection.channel(), QUEUE)


@pytest.fixture
async def master(database: DatabaseSettings) -> AsyncIterator[Candidate]:
    async with candidate(database, "first") as standing:
        yield standing


@asynccontextmanager
async def candidate(database: DatabaseSettings, name: str) -> AsyncIterator[Candidate]:
    """Yield a candidate for the master, which runs until the end of the block."""
    standing = Candidate(database, name)
    running = asyncio.create_task(standing.run())
    try:
        yield standing
    finally:
        standing.stopping.set()
        await running
