"""Whether the database hears a member. The master takes a member that is not heard for dead, and gives its partitions
to others.
"""

import asyncio
from time import monotonic


class DatabaseContact:
    """Lost when no check-in was answered for the time-out, and kept again with the next answer.

    Without it a member applies nothing anyway. But a member that has lost only the database goes on at the broker.
    While its channels are open, the queues of its partitions give their new holders nothing.

    Attributes:
        kept, lost: one of them is set.
    """

    def __init__(self, timeout: float) -> None:
        self.kept = asyncio.Event()
        self.lost = asyncio.Event()
        self._timeout = timeout
        self.keep()

    def keep(self) -> None:
        """Take note of a check-in that was answered, after the member has done what the answer asked for."""
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
