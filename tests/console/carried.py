"""Rows of some keys for an exchange, which a relay carries there as soon as a queue is bound."""

from collections.abc import AsyncIterator

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel

from tests.operate.rows import Rows

EXCHANGE, QUEUE, ROUTING_KEY = "billing", "invoices", "invoice.paid"
KEYS, ROWS = 15, 4  # keys, and rows of each
SOON = {"RELAY_HEARTBEAT_INTERVAL": "0.2", "RELAY_BACKOFF_INITIAL": "0.05"}


@pytest.fixture
async def channel(broker_url: str) -> AsyncIterator[AbstractChannel]:
    """A channel of a broker that has an exchange, and no queue."""
    async with await aio_pika.connect(broker_url) as connection:
        opened = await connection.channel()
        await opened.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
        yield opened


async def bind(channel: AbstractChannel) -> None:
    """Declare the queue, and bind it."""
    queue = await channel.declare_queue(QUEUE, durable=True)
    await queue.bind(EXCHANGE, "#")


def write(rows: Rows, number: int) -> list[int]:
    """Write a row of each key, for the exchange; return their ids."""
    return [
        rows.pending(str(key), exchange=EXCHANGE, routing_key=ROUTING_KEY)
        for _ in range(number)
        for key in range(1, KEYS + 1)
    ]


def states(rows: Rows) -> set[str]:
    return {state for state, _ in rows.states().values()}
