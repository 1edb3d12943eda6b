"""How many messages wait in a queue, and how many consumers it has."""

from typing import NamedTuple

from aiormq.exceptions import AMQPError
from pamqp.commands import Queue

from relay.servers.rabbitmq.connection import Connection, answer_within, close_channel, open_channel


class QueueDepth(NamedTuple):
    """The broker's counts of a queue. `ready` does not count messages in flight to a consumer."""

    ready: int
    consumers: int


async def ask_queue(connection: Connection, queue: str, within: float) -> QueueDepth:
    """Return the broker's counts of a queue, asked on a separate channel: a refusal closes only that channel.

    Raises:
        AMQPError, OSError, RuntimeError: there is no such queue, or no answer.
        ValueError: no queue can have this name, which a consumer has written.
    """
    Queue.Declare(queue=queue)  # checks the name, before a channel is open
    async with answer_within(f"count queue {queue}", within):
        channel = await open_channel(connection)
        declared = await channel.queue_declare(queue, passive=True)
        await close_channel(channel)
    return QueueDepth(declared.message_count or 0, declared.consumer_count or 0)


async def depth_of(connection: Connection, queue: str, within: float) -> QueueDepth | None:
    """Return what the broker answers; `None`: there is no such queue, or no answer."""
    try:
        return await ask_queue(connection, queue, within)
    except (AMQPError, OSError, RuntimeError, ValueError):
        return None


async def ready_count(connection: Connection, queue: str, within: float) -> int | None:
    """Return how many messages wait in a queue; `None`: there is no such queue, or no answer."""
    depth = await depth_of(connection, queue, within)
    return None if depth is None else depth.ready
