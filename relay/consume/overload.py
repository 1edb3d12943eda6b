"""Who may call handlers: all together, one alone, or, while something is overloaded, one to try it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from relay.backoff import Backoff, wait_for_event
from relay.consume.counters import Counters
from relay.consume.stopping import raise_if_set
from relay.logger import get_logger

log = get_logger("relay.consume")


@dataclass(frozen=True, slots=True)
class Overloaded:
    """What became of an attempt that ended by an overload: nothing was applied, and no attempt counts."""


@dataclass(slots=True)
class Entry:
    """A stay inside, which tells how it ended; what began before a pause says nothing about its end."""

    gate: "OverloadGate"
    overloads: int  # in a row, when it began

    def succeeded(self) -> None:
        """Something was applied: whoever was overloaded is not any more."""
        if self.overloads == self.gate.overloads:
            self.gate.open()

    def overloaded(self, words: str) -> None:
        if self.overloads == self.gate.overloads:
            self.gate.pause(words)


@dataclass(slots=True)
class OverloadGate:
    """Passed by everybody who is about to call a handler.

    During a pause one at a time gets in, each after a longer wait, until one of them succeeds. Nothing is handed back
    to the broker and no attempt is counted, so a pause may take as long as it likes.
    """

    backoff: Backoff
    counters: Counters
    overloads: int = 0  # in a row; 0: no pause
    _words: str = ""
    _paused_at: float = 0.0
    _due: float = 0.0
    _counted_until: float = 0.0
    _inside: int = 0
    _empty: asyncio.Event = field(default_factory=asyncio.Event)
    _door: asyncio.Lock = field(default_factory=asyncio.Lock)  # fair, so that whoever wants to be alone gets his turn

    @asynccontextmanager
    async def enter(self, stopping: asyncio.Event, *, alone: bool = False) -> AsyncIterator[Entry]:
        """Wait for the turn. Raises Stopping: no handler may be called any more."""
        async with self._door:
            if self.overloads:
                await wait_for_event(stopping, self._due - asyncio.get_running_loop().time())
                self.count()
            if alone or self.overloads:
                while self._inside and not stopping.is_set():
                    self._empty.clear()
                    await self._empty.wait()
                raise_if_set(stopping)
                yield Entry(self, self.overloads)
                return
            raise_if_set(stopping)
            self._inside += 1
        try:
            yield Entry(self, 0)
        finally:
            self._inside -= 1
            self._empty.set()

    def pause(self, words: str) -> None:
        now = asyncio.get_running_loop().time()
        self.overloads += 1
        wait = self.backoff.seconds(self.overloads)
        self._words, self._due = words, now + wait
        if self.overloads == 1:
            self._paused_at = self._counted_until = now
        log.warning("consumer.paused", overloads=self.overloads, probe_in_s=round(wait, 3), error=words)

    def open(self) -> None:
        if self.overloads:
            self.count()
            log.info("consumer.resumed", overloads=self.overloads, paused_s=round(self.counters.paused_seconds, 3))
            self.overloads = 0

    @property
    def reason(self) -> str | None:
        """Why all pause; None: they do not."""
        if not self.overloads:
            return None
        seconds = asyncio.get_running_loop().time() - self._paused_at
        return f"paused for {seconds:.0f} s: {self._words}"

    def count(self) -> None:
        """Bring `paused_seconds` up to date."""
        if self.overloads:
            now = asyncio.get_running_loop().time()
            self.counters.paused_seconds += now - self._counted_until
            self._counted_until = now
