"""What is asked only when a client wants to know, and not again for a few seconds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

FRESH_FOR = 5.0  # seconds
SHARE = 20  # what takes a while, as to count a backlog of millions: at most this part of the time goes into it
PATIENCE = 2.0  # seconds that one who asks waits for a new answer; then the last one has to do

Answer = TypeVar("Answer")


class CachedAnswer(Generic[Answer]):
    """An answer that `ask` gives, which does not raise; `None`: it is not known."""

    def __init__(self, ask: Callable[[], Awaitable[Answer | None]], *, patience: float = PATIENCE) -> None:
        self._ask = ask
        self._patience = patience
        self._asking: asyncio.Task[None] | None = None
        self._last: Answer | None = None
        self._due_at = 0.0  # loop time

    async def answer(self) -> Answer | None:
        """Return an answer, a few seconds old at most unless asking takes longer; `None` when the last try failed."""
        if self._asking is None and asyncio.get_running_loop().time() >= self._due_at:
            self._asking = asyncio.create_task(self._renew(), name="cached_answer")
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=self._patience)
        return self._last

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _renew(self) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            self._last = await self._ask()
        finally:
            self._due_at = clock() + max(FRESH_FOR, SHARE * (clock() - started))
            self._asking = None
