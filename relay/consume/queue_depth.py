"""How many messages wait in a queue."""

from aiormq.exceptions import AMQPError

from relay.broker.connection import Connection, answer_within, close_channel, open_channel


async def ready_count(connection: Connection, queue: str, within: float) -> int | None:
    """Return what the broker answers on a separate channel, which alone is closed when it refuses; `None`: no answer.

    Messages that are with a consumer do not wait.
    """
    try:
        async with answer_within(f"count queue {queue}", within):
            channel = await open_channel(connection)
            declared = await channel.queue_declare(queue, passive=True)
            await close_channel(channel)
    except (AMQPError, OSError, RuntimeError):
        return None
    return declared.message_count
