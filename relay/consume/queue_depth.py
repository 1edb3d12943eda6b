"""How many messages wait in a queue."""

import asyncio

from aiormq.exceptions import AMQPError

from relay.broker.connection import Connection, answer_within, close_channel, is_told_to_end


async def ready_count(connection: Connection, queue: str, within: float) -> int | None:
    """Ask the broker, passively and on a channel of its own, which alone is closed when it refuses; None: no answer.

    Messages that are with a consumer do not wait.
    """
    try:
        async with answer_within(f"count queue {queue}", within):
            opened = await connection.channel(publisher_confirms=False)
            channel = await opened.get_underlay_channel()
            declared = await channel.queue_declare(queue, passive=True)
            await close_channel(channel)
    # CancelledError as well when nobody asked for it: the library raises it when the connection goes away.
    except (AMQPError, OSError, RuntimeError, asyncio.CancelledError):
        if is_told_to_end():
            raise
        return None
    return declared.message_count
