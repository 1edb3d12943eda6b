"""Run a consumer in a block of an application, and several consumers at once."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from relay.errors import UsageError
from relay.logger import get_logger
from relay.runtime.hindrance import Hindrance

log = get_logger("relay.consume")

LOOK_INTERVAL = 0.02  # seconds between two looks whether it is ready


class RunsInBlock(ABC):
    """A consumer that `async with` runs in a task: ready in the block, and drained at its end.

    Signals are left to the application. An error that ends the consumer is raised at the end of the block.
    """

    _running: asyncio.Task[None] | None = None

    @abstractmethod
    async def run(self, *, signals: bool | None = None) -> None:
        """Consume until `stop`."""

    @abstractmethod
    def stop(self) -> None:
        """Drain, and let `run` return."""

    @property
    @abstractmethod
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""

    @abstractmethod
    def hindrances(self) -> Mapping[str, Hindrance]:
        """Return why it cannot work now; empty when it can."""

    async def __aenter__(self) -> Self:
        """Return when it is ready.

        Raises:
            what `run` raises at the start.
            UsageError: it runs already, or was stopped before it was ready.
        """
        if self._running is not None:
            raise UsageError("a consumer runs once: make another one for another block")
        running = self._running = asyncio.create_task(self.run(signals=False), name="consume.in block")
        try:
            while self.hindrances() and not running.done():
                await asyncio.wait([running], timeout=LOOK_INTERVAL)
        except asyncio.CancelledError:
            await self._end(running)
            raise
        if running.done():
            running.result()
            raise UsageError("the consumer was stopped before it was ready: make another one")
        running.add_done_callback(_report)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._running is not None, "the block has begun"  # noqa: S101
        await self._end(self._running)
        if error is None:
            self._running.result()

    async def _end(self, running: asyncio.Task[None]) -> None:
        """Stop, and wait for the end; when the waiting is cancelled, the consumer is, too."""
        if not running.done() and not self.is_stopping:  # a second `stop` would not wait for what is under way
            self.stop()
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([running])
            raise


def _report(running: asyncio.Task[None]) -> None:
    """Log an error as soon as it has ended the consumer: the block may go on for days."""
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("consumer.failed", reason=f"{type(error).__name__}: {error}", exc_info=error)


async def run_all(*consumers: RunsInBlock, signals: bool | None = None) -> None:
    """Run several consumers until each has stopped; when one ends by an error, the others are drained and stopped.

    Args:
        signals: as for `Consumer.run`.
    Raises:
        the error of a consumer, or several as an ExceptionGroup.
        UsageError: there is no consumer.
    """
    if not consumers:
        raise UsageError("run_all takes at least one consumer")
    running = [asyncio.create_task(each.run(signals=signals), name="consume.one of all") for each in consumers]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        for each, task in zip(consumers, running, strict=True):
            if not task.done() and not each.is_stopping:
                each.stop()
        ends = await asyncio.gather(*running, return_exceptions=True)
    except asyncio.CancelledError:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        raise
    errors = [end for end in ends if isinstance(end, Exception)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("several consumers ended by an error", errors)
