"""What handlers keep in memory of a partition: used by one transaction at a time, loaded again when one has failed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class PartitionState:
    """The state of one partition, loaded before its first message.

    Args:
        load: loads it, or raises DatabaseUnavailableError.
    """

    load: Callable[[], Awaitable[None]]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_stale: bool = False

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Have it to oneself for a transaction.

        Where that fails, or nobody knows whether it was committed, the handlers have remembered what may not be so.

        Raises:
            DatabaseUnavailableError: it has to be loaded, and could not be.
        """
        async with self._turn:
            if self._is_stale:
                await self.load()
            self._is_stale = True
            yield
            self._is_stale = False
