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
PATIENCE_AFTER_JOB = 2.0  # for the first count since a job has ended


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
        self._changed_at = 0.0  # monotonic

    def note_change(self) -> None:
        """A job has changed the groups: count them again, and let the next page wait longer for that. In the loop."""
        self._changed_at = time.monotonic()
        self._begin()

    async def counted(self) -> Counted:
        """Return the groups; raises what `read` raises."""
        if (last := self._last) is None:
            return await asyncio.shield(self._begin())
        is_outdated = last.at < self._changed_at
        ends = time.monotonic() + (PATIENCE_AFTER_JOB if is_outdated else PATIENCE)
        while True:
            counting = self._begin()
            await asyncio.wait([counting], timeout=max(0.0, ends - time.monotonic()))
            if not counting.done():
                return self._last or last
            counted = counting.result()
            if counted.at >= self._changed_at:  # else it had begun before
                return counted

    def _begin(self) -> asyncio.Task[Counted]:
        """Return the count of now."""
        if self._counting is None:
            self._counting = asyncio.create_task(self._count(), name="failure groups")
            self._counting.add_done_callback(_forget)
        return self._counting

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
