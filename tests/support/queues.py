"""Queues that get what the relay publishes."""

from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractQueue
from pamqp.common import FieldTable


async def declare_bound(
    channel: AbstractChannel, name: str, exchange_name: str = "outbox", arguments: FieldTable | None = None
) -> AbstractQueue:
    """Return a quorum queue that gets every message of the exchange. The exchange is declared if it is missing.

    `arguments` are added to the queue's own, and take precedence over them.
    """
    exchange = await channel.declare_exchange(exchange_name, ExchangeType.TOPIC, durable=True)
    queue = await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum", **(arguments or {})})
    await queue.bind(exchange, "#")
    return queue
