"""How fast a replay may go: as told, or so that live traffic keeps its pace."""

import asyncio

FULL = float("inf")
SLICE = 0.01  # seconds' worth of messages that may go out at once
NAP = 0.05  # longest sleep at a time, so that a stop is noticed

QUIET_AFTER = 1.0  # seconds without a new row, after which nothing is in the way
BESIDE_LIVE = 1000.0  # messages a second next to live traffic


class Pace:
    """Decides how many messages may go now.

    Attributes:
        limit: messages a second; FULL: no bound.
    """

    def __init__(self, rate: float | None) -> None:
        self.is_fixed = rate is not None
        self.limit = BESIDE_LIVE if rate is None else rate
        self._loop = asyncio.get_running_loop()
        self._room = 0.0
        self._counted_at = self._loop.time()
        self._last_id: int | None = None
        self._busy_at = self._counted_at

    async def room(self, wanted: int) -> int:
        """Wait a little, if there is no room; return how many of `wanted` messages may be sent now."""
        limit = self.limit
        now = self._loop.time()
        if limit == FULL:
            self._counted_at = now
            return wanted
        self._room = min(self._room + (now - self._counted_at) * limit, max(1.0, limit * SLICE))
        self._counted_at = now
        if self._room < 1:
            await asyncio.sleep(min(NAP, max(SLICE, (1 - self._room) / limit) if limit else NAP))
            return 0
        given = min(wanted, int(self._room))
        self._room -= given
        return given

    def see(self, last_id: int, is_pending: bool) -> None:
        """Take note of the live rows: does an application write, or a row wait?"""
        now = self._loop.time()
        if is_pending or last_id != self._last_id:
            self._busy_at = now
        self._last_id = last_id
        self.limit = FULL if now - self._busy_at > QUIET_AFTER else BESIDE_LIVE
