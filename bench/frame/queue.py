"""The queue that takes the benchmarks' messages: a quorum queue bound to the durable topic exchange."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractQueue
from pamqp.common import FieldTable

EXCHANGE = "outbox"
QUEUE = "bench.invoices"

Answer = TypeVar("Answer")


def bind_queue(broker_url: str, routing_key: str) -> None:
    """Make the exchange and the queue, and bind them for one routing key."""

    async def declare(channel: AbstractChannel) -> None:
        exchange = await channel.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind(exchange, routing_key)

    _on_channel(broker_url, declare)


def declare_full(broker_url: str, name: str) -> None:
    """Make a queue that refuses every message."""

    async def declare(channel: AbstractChannel) -> None:
        arguments: FieldTable = {"x-queue-type": "quorum", "x-max-length": 0, "x-overflow": "reject-publish"}
        await channel.declare_queue(name, durable=True, arguments=arguments)

    _on_channel(broker_url, declare)


def depth(broker_url: str, name: str = QUEUE) -> int:
    """Return how many messages a queue holds. The leader answers, so every confirmed one is counted."""

    async def count(channel: AbstractChannel) -> int:
        return (await channel.declare_queue(name, passive=True)).declaration_result.message_count or 0

    return _on_channel(broker_url, count)


def purge(broker_url: str) -> None:
    """Empty the queue."""

    async def empty(channel: AbstractChannel) -> None:
        await (await _queue(channel)).purge()

    _on_channel(broker_url, empty)


async def _queue(channel: AbstractChannel) -> AbstractQueue:
    return await channel.declare_queue(QUEUE, passive=True)


def _on_channel(broker_url: str, work: Callable[[AbstractChannel], Awaitable[Answer]]) -> Answer:
    async def run() -> Answer:
        async with await aio_pika.connect(broker_url, timeout=10) as connection, connection.channel() as channel:
            return await work(channel)

    return asyncio.run(run())
