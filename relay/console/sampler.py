"""The figures of the last hour: one sampler reads them, and all browsers see what it has read.

So that a hundred open pages cost the database no more than one, no page asks the database for figures itself.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from starlette.concurrency import run_in_threadpool

from relay.config.settings import Settings
from relay.console.database import Database
from relay.errors import OutboxError
from relay.logger import get_logger
from relay.operate.latency import Latency, read_latency
from relay.operate.status import Status, published, read_status
from relay.runtime.backoff import wait_for_event
from relay.runtime.scrub import scrub

INTERVAL = 1.0  # seconds between two looks while a browser watches
IDLE_INTERVAL = 10.0  # while no browser does; the history goes on
SHARE = 10  # a look may take this part of the time: where it takes long, looks are fewer
KEPT = 3600.0  # seconds of history
POINT = 10.0  # seconds that a point of the history stands for
RATE_OVER = 5.0  # seconds, at least, over which the rate is measured

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """Some seconds of the history: the worst of each figure."""

    at: float  # monotonic
    backlog: int
    age_s: float
    rate: float
    failures: int
    latency_s: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """What one look saw.

    Attributes:
        number: counts the looks.
        status: None when the database did not answer; `error` says why.
        rate: messages a second.
        history: of the last hour, the oldest first.
    """

    number: int
    at: datetime
    status: Status | None
    error: str | None
    rate: float | None
    latency: Latency | None
    history: tuple[Point, ...]


class Sampler:
    """Looks at the outbox again and again, in one session.

    Attributes:
        latest: None until the first look has ended.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._settle_after = 3 * settings.relay.heartbeat_interval  # counters move with heartbeats
        self._looks: deque[tuple[float, int, dict[str, int]]] = deque()  # when, all published, by node
        self._history: deque[Point] = deque()
        self._watchers = 0
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._number = 0
        self._stopped = False
        self.latest: Sample | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            begun = time.monotonic()
            sample = await run_in_threadpool(self._look)
            async with self._changed:
                self.latest = sample
                self._changed.notify_all()
            took = time.monotonic() - begun
            pause = max(INTERVAL if self._watchers else IDLE_INTERVAL, took * SHARE) - took
            self._wanted.clear()
            # Not wait_for: in Python 3.11 it loses a cancel that comes together with the event.
            await wait_for_event(self._wanted, max(pause, 0.1))

    async def stop(self) -> None:
        """End every stream of samples."""
        async with self._changed:
            self._stopped = True
            self._changed.notify_all()

    async def samples(self) -> AsyncGenerator[Sample]:
        """Yield the latest sample, and each new one, until `stop`; a slow reader misses some."""
        self._watchers += 1
        if self._watchers == 1:
            self._wanted.set()
        seen = 0
        try:
            while not self._stopped:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._stopped or self._is_newer(seen))  # noqa: B023
                if self.latest is not None and not self._stopped:
                    seen = self.latest.number
                    yield self.latest
        finally:
            self._watchers -= 1

    def _is_newer(self, seen: int) -> bool:
        return self.latest is not None and self.latest.number > seen

    def _look(self) -> Sample:
        """Return a sample; called in a thread, and never twice at once."""
        self._number += 1
        status, latency, error = None, None, None
        try:
            with self._database.session() as connection:
                before = self._before()
                status = read_status(
                    connection,
                    self._database.schema,
                    progress_timeout=self._settle_after,
                    published_before=before,
                )
                latency = read_latency(connection, self._database.schema)
        except OutboxError as failure:
            error = scrub(str(failure))
        except Exception as failure:  # the next look may go well
            error = "a fault of the console: see its log"
            log.error("console.look_failed", exc_info=failure)
        rate = self._keep(status, latency)
        return Sample(self._number, datetime.now(UTC), status, error, rate, latency, tuple(self._history))

    def _before(self) -> dict[str, int] | None:
        """Return what each relay had published when its counters have settled since; None if no look is so old."""
        limit = time.monotonic() - self._settle_after
        return next((nodes for at, _, nodes in reversed(self._looks) if at <= limit), None)

    def _keep(self, status: Status | None, latency: Latency | None) -> float | None:
        """Add a look to the history; return the rate."""
        now = time.monotonic()
        while self._history and self._history[0].at < now - KEPT:
            self._history.popleft()
        if status is None:
            self._looks.clear()
            return None
        rate = self._rate(now, status.published_total)
        self._looks.append((now, status.published_total, published(status.nodes)))
        while self._looks and self._looks[0][0] < now - max(RATE_OVER, self._settle_after) - IDLE_INTERVAL:
            self._looks.popleft()
        point = Point(
            at=now,
            backlog=status.pending,
            age_s=status.oldest_pending_age_s or 0.0,
            rate=rate or 0.0,
            failures=status.parked + status.quarantined,
            latency_s=None if latency is None else latency.p95_s,
        )
        if self._history and now - self._history[-1].at < POINT:
            self._history[-1] = _worse(self._history[-1], point)
        else:
            self._history.append(point)
        return rate

    def _rate(self, now: float, total: int) -> float | None:
        """Return the messages a second since a look some seconds ago."""
        earlier = next((look for look in reversed(self._looks) if look[0] <= now - RATE_OVER), None)
        at, before, _ = earlier or (self._looks[0] if self._looks else (now, total, {}))
        return max(0, total - before) / (now - at) if now > at else None


def _worse(one: Point, other: Point) -> Point:
    latencies = [each.latency_s for each in (one, other) if each.latency_s is not None]
    return replace(
        one,
        backlog=max(one.backlog, other.backlog),
        age_s=max(one.age_s, other.age_s),
        rate=max(one.rate, other.rate),
        failures=max(one.failures, other.failures),
        latency_s=max(latencies, default=None),
    )
