"""How fast a job may go."""

import asyncio

FULL = float("inf")
SLICE = 0.01  # seconds' worth of rows that may go at once
NAP = 0.05  # longest sleep at a time, so that a stop is noticed


class Pace:
    """Decides how many rows may go now.

    Args:
        rate: rows a second; FULL: no bound.
        grain: seconds' worth of rows that a work waits for, because each step costs it a transaction.

    Attributes:
        limit: the rate of now.
    """

    def __init__(self, rate: float, *, grain: float = 0.0) -> None:
        self.limit = rate
        self._grain = grain
        self._loop = asyncio.get_running_loop()
        self._room = 1.0
        self._counted_at = self._loop.time()

    async def room(self, wanted: int) -> int:
        """Wait a little, if there is no room; return how many of `wanted` rows may go now."""
        limit, now = self.limit, self._loop.time()
        if limit == FULL:
            self._counted_at = now
            return wanted
        self._room = min(self._room + (now - self._counted_at) * limit, max(1.0, limit * (SLICE + 2 * self._grain)))
        self._counted_at = now
        needed = min(wanted, max(1.0, limit * self._grain))
        if self._room < needed:
            await asyncio.sleep(min(NAP, max(SLICE, (needed - self._room) / limit) if limit else NAP))
            return 0
        given = min(wanted, int(self._room))
        self._room -= given
        return given

    def give_back(self, rows: int) -> None:
        """Take back what was given, and did not go."""
        self._room += rows
