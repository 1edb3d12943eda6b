"""Wait for the database that is away, and know that somebody does."""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import structlog

from relay.backoff import Backoff, wait_for_event
from relay.connection_refusals import ConnectionRefusals
from relay.consume.counters import Counters
from relay.consume.failures import cause_of
from relay.database import kind_of_loss, one_line
from relay.errors import UnavailableError

log = structlog.get_logger("relay.consume")


@dataclass(slots=True)
class Outages:
    """Which connections of a consumer wait for the database, and why."""

    backoff: Backoff
    counters: Counters
    refusals: ConnectionRefusals
    waiting: dict["Outage", str] = field(default_factory=dict)

    def begin(self) -> "Outage":
        """Begin something that may have to wait; in a `with`, at the end of which nobody waits any more."""
        return Outage(self)

    @property
    def reason(self) -> str | None:
        """Why one of them waits; None: none does."""
        reason = next(iter(self.waiting.values()), None)
        return reason and self.refusals.words("database", reason)


@dataclass(slots=True, eq=False)
class Outage:
    """The failures in a row of one connection; none: it works, as far as anybody knows."""

    outages: Outages
    failures: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    async def wait(self, error: Exception, stopping: asyncio.Event) -> None:
        """Say that the database was lost, and wait until it is time for the next try, or we are to stop."""
        self.failures += 1
        if self.failures == 1:
            self.outages.counters.database_losses[kind_of_loss(cause_of(error.__cause__ or error))] += 1
        reason = self.outages.waiting[self] = one_line(error) or type(error).__name__
        is_refusal = isinstance(error, UnavailableError) and error.is_refusal
        self.outages.refusals.note("database", reason, is_refusal=is_refusal)
        wait = self.outages.backoff.seconds(self.failures)
        log.warning("database.lost", attempts=self.failures, retry_in_s=round(wait, 3), error=reason)
        await wait_for_event(stopping, wait)

    def end(self) -> None:
        """It works again."""
        self.failures = 0
        self.outages.waiting.pop(self, None)
        if not self.outages.waiting:
            self.outages.refusals.clear("database")
