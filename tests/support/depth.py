"""How many messages a queue holds."""

from collections.abc import Awaitable, Callable

ZEROS = 5  # in a row


async def depth(count: Callable[[], Awaitable[int | None]]) -> int:
    """Give what `count` tells of a queue; RabbitMQ 3.10 says 0, too, when a quorum queue's leader is slow to answer."""
    for _ in range(ZEROS):
        if number := await count():
            return number
    return 0
