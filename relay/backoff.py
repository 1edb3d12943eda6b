"""How long to wait before the next try, and what ends the wait."""

import asyncio
import random
from contextlib import suppress


def backoff(attempt: int, initial: float, maximum: float) -> float:
    """Give the seconds to wait after the `attempt`-th failure (1, 2, ...): doubling, bounded, with full jitter.

    At least half of the step, so that a burst of failures neither returns at once nor all together.
    """
    step = min(maximum, initial * 2.0 ** min(attempt - 1, 30))
    return step * random.uniform(0.5, 1.0)  # noqa: S311  (nothing to do with secrets)


async def wait_for_event(event: asyncio.Event, within: float | None) -> None:
    """Return once the event is set, or `within` seconds are over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            await event.wait()
