"""Wait for a condition that another process or server brings about."""

import asyncio
from collections.abc import Awaitable, Callable

POLL = 0.01  # seconds between two looks


async def eventually(
    condition: Callable[[], Awaitable[bool]] | Callable[[], bool], what: str, within: float = 60
) -> None:
    """Return once the condition holds. The condition is a function or a coroutine function.

    Raises:
        TimeoutError: the condition did not hold in time; the message names `what`.
    """
    try:
        async with asyncio.timeout(within):
            while True:
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(POLL)
    except TimeoutError:
        raise TimeoutError(f"{what}: not within {within:g} s") from None
