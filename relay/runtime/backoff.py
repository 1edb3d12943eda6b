"""How long to wait before the next try or look, and what ends the wait."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

PHASE = random.random()  # noqa: S311  (nothing to do with secrets)


def backoff(attempt: int, initial: float, maximum: float, *, multiplier: float = 2.0) -> float:
    """Return the seconds to wait after the `attempt`-th failure (1, 2, ...): growing, bounded, with jitter.

    At least half of the step, so that a burst of failures neither returns at once nor all together.
    """
    step = longest_wait(attempt, initial, maximum, multiplier=multiplier)
    return step * random.uniform(0.5, 1.0)  # noqa: S311  (nothing to do with secrets)


def longest_wait(attempt: int, initial: float, maximum: float, *, multiplier: float = 2.0) -> float:
    """Return the step from which chance takes some: `multiplier` times as long after each failure, bounded."""
    step = initial
    for _ in range(attempt - 1):
        if step >= maximum:
            break
        step *= multiplier
    return min(step, maximum)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the n-th try: doubling, bounded, and spread so that many do not come at once."""

    initial: float = 0.5
    maximum: float = 30.0

    def seconds(self, attempts: int) -> float:
        return backoff(attempts, self.initial, self.maximum)


def until_tick(interval: float) -> float:
    """Return the seconds until the clock has gone on by a multiple of `interval`, the same moment for all who ask.

    Waking up costs an idle process more than what it does then: what is looked at every second is looked at together.
    Other processes have other moments.
    """
    left = interval - (asyncio.get_running_loop().time() + PHASE * interval) % interval
    return left if left > interval / 10 else left + interval  # a timer may be over a little early


async def wait_for_event(event: asyncio.Event, within: float | None) -> None:
    """Return once the event is set, or `within` seconds are over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            await event.wait()


class Stopping(Exception):  # noqa: N818  (nothing went wrong)
    """A stop was asked for, so that what was waited for cannot happen any more.

    The tasks of a node, a consumer or a replay end by it; no code outside of them sees it.
    """


def raise_if_set(stopping: asyncio.Event) -> None:
    """Raise Stopping if a stop was asked for."""
    if stopping.is_set():
        raise Stopping


async def unless_stopping(stopping: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. Raises Stopping: the event was set before, and `work` was cancelled.

    `work` runs in the caller's task. If it ran in another one, a cancel of the caller would lose a result that came in
    the same tick. Such a result may be a connection, which no code would close then.
    """
    try:
        async with cut_when(stopping) as cut:
            return await work
    except TimeoutError:
        if not cut.expired():
            raise
        raise Stopping from None


@asynccontextmanager
async def cut_when(told: asyncio.Event, after: float = 0.0) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block `after` seconds after the event is set.

    Raises:
        TimeoutError: the block was cancelled, if the yielded time-out has `expired`.
    """

    async def watch(cut: asyncio.Timeout) -> None:
        await told.wait()
        cut.reschedule(asyncio.get_running_loop().time() + after)

    async with asyncio.timeout(None) as cut:
        watching = asyncio.create_task(watch(cut), name="deadline")
        try:
            yield cut
        finally:
            watching.cancel()
