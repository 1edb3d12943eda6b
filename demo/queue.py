"""The queue between relay and consumer: quorum, so that a confirmed message is on disk."""

import asyncio

import aio_pika
from aio_pika.exceptions import ChannelNotFoundEntity

from relay.config.settings import BrokerSettings
from relay.servers.rabbitmq.connection import connect

QUEUE = "billing.invoices"
BINDING = "*.InvoiceIssued"  # the relay's routing keys are <aggregate_type>.<event_type>


def declare(broker: BrokerSettings) -> None:
    """Make the exchange and the queue bound to it, as far as they are missing."""
    asyncio.run(_declare(broker))


def depth(broker: BrokerSettings, queue: str = QUEUE) -> int:
    """Return how many messages wait in a queue; those that a consumer holds are not among them."""
    return asyncio.run(_depth(broker, queue))


async def _declare(broker: BrokerSettings) -> None:
    connection = await connect(broker, "outbox-demo")
    async with connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange(broker.exchange, aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind(exchange, BINDING)


async def _depth(broker: BrokerSettings, name: str) -> int:
    connection = await connect(broker, "outbox-demo")
    async with connection:
        channel = await connection.channel()
        try:
            queue = await channel.declare_queue(name, passive=True)
        except ChannelNotFoundEntity:
            return 0
        return queue.declaration_result.message_count or 0
