"""The groups of failures, as they are now; or as they were a moment ago, where it takes long to count millions.

One count at a time serves all browsers.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from relay.operate.failures import Group

PATIENCE = 0.15  # seconds that a page waits for a count; then the last one has to do


@dataclass(frozen=True, slots=True)
class Counted:
    """Groups, as of a moment."""

    groups: Sequence[Group]
    at: float  # monotonic, when the count began

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.at


class FailureGroups:
    """Counts the groups when a page asks.

    Args:
        read: returns the groups, in a thread; it may raise.
    """

    def __init__(self, read: Callable[[], Sequence[Group]]) -> None:
        self._read = read
        self._counting: asyncio.Task[Counted] | None = None
        self._last: Counted | None = None

    async def counted(self) -> Counted:
        """Return the groups; raises what `read` raises."""
        if self._counting is None:
            self._counting = asyncio.create_task(self._count(), name="failure groups")
            self._counting.add_done_callback(_forget)
        counting = self._counting
        await asyncio.wait([counting], timeout=PATIENCE if self._last else None)
        return counting.result() if self._last is None or counting.done() else self._last

    async def close(self) -> None:
        """Wait for the end of a count."""
        if self._counting is not None:
            await asyncio.wait([self._counting])

    async def _count(self) -> Counted:
        begun = time.monotonic()
        try:
            self._last = Counted(await run_in_threadpool(self._read), begun)
            return self._last
        finally:
            self._counting = None


def _forget(counting: asyncio.Task[Counted]) -> None:
    """Take the error of a count that no page waits for any more: the next count tells it."""
    if not counting.cancelled():
        counting.exception()
