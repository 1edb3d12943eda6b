"""The state of a partition that handlers keep in memory: one transaction at a time uses it.

When a transaction fails, the state is loaded again.
"""

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
        """Keep the state for one transaction alone.

        When the transaction fails, or whether it was committed is unknown, the state in memory may be wrong. The next
        use loads it again.

        Raises:
            DatabaseUnavailableError: the state must be loaded again, and could not be.
        """
        async with self._turn:
            if self._is_stale:
                await self.load()
            self._is_stale = True
            yield
            self._is_stale = False
