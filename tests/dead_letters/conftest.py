"""A consumed queue, its dead letters, and the audit."""

from collections.abc import AsyncIterator, Iterator

import aio_pika
import psycopg
import pytest
from psycopg.rows import dict_row

from relay.config.settings import BrokerSettings, DatabaseSettings
from tests.consume.conftest import client, inbox, queue, table
from tests.consume.effects import Queue
from tests.dead_letters.letters import Letters

__all__ = ["client", "inbox", "queue", "table"]  # fixtures


@pytest.fixture
async def letters(queue: Queue, broker: BrokerSettings, broker_url: str) -> AsyncIterator[Letters]:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        found = Letters(queue, await channel.get_underlay_channel(), broker)
        await found.declare()
        yield found


@pytest.fixture
def audit(database: DatabaseSettings) -> Iterator[psycopg.Connection[psycopg.rows.DictRow]]:
    url = database.url.get_secret_value()
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        yield connection
