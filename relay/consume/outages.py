"""Wait for the database that is away, and know that somebody does."""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from relay.backoff import Backoff, wait_for_event
from relay.consume.classify import cause_of
from relay.consume.counters import Counters
from relay.database import kind_of_loss, one_line
from relay.engine.health import Health
from relay.errors import UnavailableError


@dataclass(slots=True)
class Outages:
    """Which connections of a consumer wait for the database; it is lost while one of them does."""

    backoff: Backoff
    counters: Counters
    health: Health
    waiting: set["Outage"] = field(default_factory=set)

    def begin(self, backoff: Backoff | None = None) -> "Outage":
        """Begin something that may have to wait; in a `with`, at the end of which nobody waits any more."""
        return Outage(self, backoff or self.backoff)


@dataclass(slots=True, eq=False)
class Outage:
    """The failures in a row of one connection; none: it works, as far as anybody knows."""

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
        """Say that the database was lost, and wait until it is time for the next try, or we are to stop."""
        self.failures += 1
        if self.failures == 1:
            self.outages.counters.database_losses[kind_of_loss(cause_of(error.__cause__ or error))] += 1
        self.outages.waiting.add(self)
        is_refusal = isinstance(error, UnavailableError) and error.is_refusal
        reason = one_line(error) or type(error).__name__
        self.outages.health.degrade("database", reason, is_refusal=is_refusal)
        await wait_for_event(stopping, self.backoff.seconds(self.failures))

    def leave(self) -> None:
        """Wait no more; whether the database works is for others to find out."""
        self.outages.waiting.discard(self)

    def end(self) -> None:
        """It works."""
        self.failures = 0
        self.leave()
        if not self.outages.waiting:
            self.outages.health.heal("database")
