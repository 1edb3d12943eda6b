"""The queue, the table and the inbox of one test."""

from collections.abc import AsyncIterator

import aio_pika
import pytest

from relay.consume import Inbox
from relay.database import connect_async
from relay.settings import DatabaseSettings
from tests.consume.effects import CONSUMER, EFFECTS, Queue, Table


@pytest.fixture
async def queue(broker_url: str) -> AsyncIterator[Queue]:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = Queue(channel)
        await queue.declare()
        yield queue


@pytest.fixture
async def table(database: DatabaseSettings) -> AsyncIterator[Table]:
    async with await connect_async(database) as connection:
        await connection.execute(EFFECTS)
        yield Table(connection)


@pytest.fixture
def inbox(database: DatabaseSettings) -> Inbox:
    return Inbox(database, CONSUMER)
