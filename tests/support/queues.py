"""Queues that get what the relay publishes."""

from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractQueue
from pamqp.common import FieldTable

from relay.testing.servers.rabbitmq import RabbitServer


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


def keep_queues(node: RabbitServer) -> None:
    """Let the quorum queues that were just declared outlive a kill.

    RabbitMQ 3.10 does not write at once where a new one has its log. Killed half a second later, it finds the queue
    again, but empty and without a leader, for good; three seconds later the queue was whole.
    """
    node.call("lists:foreach(fun dets:sync/1, dets:all()).")
