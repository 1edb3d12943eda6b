"""How many messages a queue holds."""

from collections.abc import Awaitable, Callable

ZEROS = 5  # in a row


async def depth(count: Callable[[], Awaitable[int | None]]) -> int:
    """Return the number that `count` reads. RabbitMQ 3.10 also answers 0 while a quorum queue's leader is slow."""
    for _ in range(ZEROS):
        if number := await count():
            return number
    return 0
