"""Whether a member's check-ins reach the database.

When they do not, the master takes the member for dead, and gives its partitions to others.
"""

import asyncio
from time import monotonic


class DatabaseContact:
    """Lost when no check-in was answered for the time-out, and kept again with the next answer.

    Without the database a member applies nothing anyway. But a member that has lost only the database still has open
    channels at the broker. While they are open, the queues of its partitions deliver nothing to their new holders.

    Attributes:
        kept, lost: exactly one of them is set.
    """

    def __init__(self, timeout: float) -> None:
        self.kept = asyncio.Event()
        self.lost = asyncio.Event()
        self._timeout = timeout
        self.keep()

    def keep(self) -> None:
        """Note that a check-in was answered. The member calls this after it has acted on the answer."""
        self._answered_at = monotonic()
        self.lost.clear()
        self.kept.set()

    async def watch(self) -> None:
        """Set `lost` when the time-out has passed without an answer; runs until cancelled."""
        while True:
            await self.kept.wait()
            left = self._answered_at + self._timeout - monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                self.kept.clear()
                self.lost.set()
