"""What a relay in a container has sent: a queue that gets everything, and counts of the table."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import LiteralString

import aio_pika
import psycopg
from aio_pika.abc import AbstractQueue

from tests.support.queues import declare_bound

WITNESS = "witness"


LEFT = "SELECT count(*) FROM outbox.message WHERE state <> 'sent'"


@asynccontextmanager
async def witness(broker_url: str) -> AsyncIterator[AbstractQueue]:
    """A queue that gets everything that the relay publishes."""
    async with await aio_pika.connect(broker_url) as connection:
        yield await declare_bound(await connection.channel(), WITNESS)


async def has_none(reader: psycopg.AsyncConnection, query: LiteralString) -> bool:
    return await number(reader, query) == 0


async def number(reader: psycopg.AsyncConnection, query: LiteralString) -> int:
    row = await (await reader.execute(query)).fetchone()
    return int(row[0]) if row else 0
