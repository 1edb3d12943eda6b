"""Queues that get what the relay publishes."""

from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractQueue


async def declare_bound(channel: AbstractChannel, name: str, exchange_name: str = "outbox") -> AbstractQueue:
    """Declare a quorum queue bound to all that the relay's exchange gets, and the exchange when it is missing."""
    exchange = await channel.declare_exchange(exchange_name, ExchangeType.TOPIC, durable=True)
    queue = await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
    await queue.bind(exchange, "#")
    return queue
