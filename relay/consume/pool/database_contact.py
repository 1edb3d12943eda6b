"""Whether the database hears a member: who is not heard may be taken for dead, and his partitions be with others."""

import asyncio
from time import monotonic


class Touch:
    """Lost when no check-in was answered for the time-out, and kept again with the next answer.

    Without it a member applies nothing anyway. But a member that has lost the database alone goes on at the broker,
    and for as long as his channels are open, the queues of his partitions give their new holders nothing.

    Attributes:
        kept, lost: one of them is set.
    """

    def __init__(self, timeout: float) -> None:
        self.kept = asyncio.Event()
        self.lost = asyncio.Event()
        self._timeout = timeout
        self.keep()

    def keep(self) -> None:
        """Take note of a check-in that was answered, and acted upon."""
        self._answered_at = monotonic()
        self.lost.clear()
        self.kept.set()

    async def watch(self) -> None:
        """Notice, until cancelled, that it is lost."""
        while True:
            await self.kept.wait()
            left = self._answered_at + self._timeout - monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                self.kept.clear()
                self.lost.set()
