"""What keeps a consumer from its work, although no message has caused it.

The consumer is told to stop, a handler reports an overload, the database is unreachable, or no message in flight
settles.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from relay.consume.counters import Counters
from relay.consume.database_faults import cause_of
from relay.errors import UnavailableError
from relay.logger import get_logger
from relay.runtime.backoff import Backoff, raise_if_set, until_tick, wait_for_event
from relay.runtime.health import Health
from relay.runtime.silence import StallTimer
from relay.servers.postgres.database import kind_of_loss, one_line

STALL_LOOK_INTERVAL = 1.0  # seconds

log = get_logger("relay.consume")


@dataclass(frozen=True, slots=True)
class Overloaded:
    """The result of a try that ended by an overload: nothing was applied, and it does not count as an attempt."""


@dataclass(slots=True)
class Entry:
    """One pass through the gate, which reports how its try ended. A try that began before a pause cannot end it."""

    gate: "OverloadGate"
    overloads: int  # in a row, when this pass began

    def succeeded(self) -> None:
        """Report that a message was applied: the overload is over."""
        if self.overloads == self.gate.overloads:
            self.gate.open()

    def overloaded(self, words: str) -> None:
        if self.overloads == self.gate.overloads:
            self.gate.pause(words)


@dataclass(slots=True)
class OverloadGate:
    """The gate that a worker passes before it calls a handler: all together, one alone, or one to try during a pause.

    During a pause the gate admits one worker at a time, each after a longer wait, until one of them succeeds. No
    message is given back to the broker and no attempt is counted, so a pause may last for any time.
    """

    backoff: Backoff
    counters: Counters
    overloads: int = field(init=False, default=0)  # in a row; 0: no pause
    _words: str = field(init=False, default="")
    _paused_at: float = field(init=False, default=0.0)
    _due: float = field(init=False, default=0.0)
    _counted_until: float = field(init=False, default=0.0)
    _inside: int = field(init=False, default=0)
    _empty: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _door: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # fair: a worker that must be alone gets in

    @asynccontextmanager
    async def enter(self, stopping: asyncio.Event, *, alone: bool = False) -> AsyncIterator[Entry]:
        """Wait for the turn. Raises Stopping: no handler may be called from now on."""
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
        """Return why all workers pause; None: they do not pause."""
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


@dataclass(slots=True)
class Outages:
    """The connections of a consumer that wait for the database. The database counts as lost while one of them waits."""

    backoff: Backoff
    counters: Counters
    health: Health
    waiting: set["Outage"] = field(default_factory=set)

    def begin(self, backoff: Backoff | None = None) -> "Outage":
        """Return an outage for work that may have to wait for the database. Leaving its `with` ends its wait."""
        return Outage(self, backoff or self.backoff)


@dataclass(slots=True, eq=False)
class Outage:
    """The failures in a row of one connection; with 0 failures it is not known to be lost."""

    outages: Outages
    backoff: Backoff
    failures: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    async def wait(self, error: Exception, stopping: asyncio.Event) -> None:
        """Report that the database was lost, and wait until it is time for the next try, or `stopping` is set."""
        self.failures += 1
        if self.failures == 1:
            self.outages.counters.database_losses[kind_of_loss(cause_of(error.__cause__ or error))] += 1
        self.outages.waiting.add(self)
        is_refusal = isinstance(error, UnavailableError) and error.is_refusal
        reason = one_line(error) or type(error).__name__
        self.outages.health.degrade("database", reason, is_refusal=is_refusal)
        await wait_for_event(stopping, self.backoff.seconds(self.failures))

    def leave(self) -> None:
        """Wait no longer. Whether the database works stays unknown."""
        self.outages.waiting.discard(self)

    def end(self) -> None:
        """Report that the database works."""
        self.failures = 0
        self.leave()
        if not self.outages.waiting:
            self.outages.health.heal("database")


class StallWatch:
    """Notices a stall: messages are in flight, but no message settles, while the consumer has a channel.

    It reads counters that exist anyway, once a second, so it adds no cost to a message.

    Attributes:
        reason: set while delivery is stalled. A pause or an idle consumer is no stall.
    """

    def __init__(self, counters: Counters, gate: OverloadGate, stall_after: float) -> None:
        self._counters = counters
        self._gate = gate
        self._timer = StallTimer(stall_after)
        self.reason: str | None = None

    async def run(self) -> None:
        self._timer.restart(time.monotonic())
        try:
            while True:
                self.look(time.monotonic())
                await asyncio.sleep(until_tick(STALL_LOOK_INTERVAL))
        finally:
            self.reason = None

    def look(self, now: float) -> None:
        counters = self._counters
        # A held message is in flight without being a delivery, and settles without being acknowledged.
        in_hand = max(counters.unacknowledged, counters.in_flight)
        settled = counters.acknowledged + counters.applied + counters.failed
        seconds = self._timer.look(settled, 0 if self._gate.overloads else in_hand, now)
        if seconds is not None:
            if self.reason is None:
                log.warning("delivery.stalled", waiting=in_hand, seconds=round(seconds, 1))
            self.reason = f"nothing has settled for {seconds:.0f} s, messages in hand: {in_hand}"
        elif self.reason is not None:
            self.reason = None
            log.info("delivery.resumed")
