"""The figures of the last hour: one sampler reads them, and all browsers see what it has read.

So that a hundred open pages cost the database no more than one, no page asks the database for figures itself.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from relay.config.settings import Settings
from relay.console.database import Database
from relay.errors import OutboxError
from relay.jobs.job import PausedJobs, paused_jobs
from relay.logger import get_logger
from relay.operate.latency import read_latency
from relay.operate.status import NodeStatus, Status, published, read_status
from relay.runtime.backoff import wait_for_event
from relay.runtime.scrub import scrub

INTERVAL = 1.0  # seconds between two looks while a browser watches
IDLE_INTERVAL = 10.0  # while no browser does; the history goes on
SHARE = 10  # a look may take this part of the time: where it takes long, looks are fewer
KEPT = 3600.0  # seconds of history
POINT = 10.0  # seconds that a point of the history stands for
BEAT = 2.0  # seconds, at most, between two samples that a reader gets
PAUSED_NAMED, REASON_LENGTH = 3, 300  # paused jobs that are named, and characters of each one's reason
RATE_OVER = 5.0  # seconds, at least, over which the rate is measured

log = get_logger(__name__)
Figure = TypeVar("Figure", int, float)


@dataclass(frozen=True, slots=True)
class Point:
    """Some seconds of the history: the worst of each figure; None where nobody knows it."""

    at: float  # monotonic
    backlog: int | None
    age_s: float | None
    rate: float | None
    in_queues: int | None
    parked: int | None
    latency_s: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """What one look saw.

    Attributes:
        number: counts the looks.
        status: None when the database did not answer; `error` says why.
        nodes: the relays as they were last seen.
        rate: messages a second.
        paused: jobs that wait for an operator.
        sent_none: whether nothing was sent since rows wait for a route that does not work.
        history: of the last hour, the oldest first.
    """

    number: int
    at: datetime
    status: Status | None
    error: str | None
    nodes: Sequence[NodeStatus]
    rate: float | None
    paused: PausedJobs
    sent_none: bool
    latency_s: float | None
    history: tuple[Point, ...]

    @property
    def backlog(self) -> int | None:
        """Rows that wait, also for a route."""
        return backlog(self.status) if self.status else None

    @property
    def age_s(self) -> float | None:
        """How long the oldest of them has waited, in seconds; None when no row waits."""
        return age_s(self.status, self.at) if self.status else None


class Sampler:
    """Looks at the outbox again and again, in one session.

    Attributes:
        latest: None until the first look has ended.

    Args:
        in_queues: returns how many messages wait for consumers; None when that is not known.
    """

    def __init__(self, settings: Settings, database: Database, in_queues: Callable[[], int | None]) -> None:
        self._in_queues = in_queues
        self._database = database
        self._settle_after = 3 * settings.relay.heartbeat_interval  # counters move with heartbeats
        self._looks: deque[tuple[float, int, dict[str, int]]] = deque()  # when, all published, by node
        self._history: deque[Point] = deque()
        self._earlier: Sequence[Point] = ()  # of consoles before this one
        self._watchers = 0
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._number = 0
        self._published_when_broken: int | None = None
        self._nodes: Sequence[NodeStatus] = ()
        self._paused = PausedJobs()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self.latest: Sample | None = None

    def restore(self, points: Sequence[Point]) -> None:
        """Take the history that an earlier console has kept; any thread may call it."""
        self._earlier = points

    async def run(self) -> None:
        """Look until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            begun = time.monotonic()
            sample = await run_in_threadpool(self._look)
            async with self._changed:
                self.latest = sample
                self._changed.notify_all()
            took = time.monotonic() - begun
            pause = max(INTERVAL if self._watchers else IDLE_INTERVAL, took * SHARE) - took
            # Not wait_for: in Python 3.11 it loses a cancel that comes together with the event.
            await wait_for_event(self._wanted, max(pause, 0.1))

    @property
    def paused_jobs(self) -> int:
        """How many jobs wait for an operator, as the latest look saw."""
        return self.latest.paused.total if self.latest else 0

    def wake(self) -> None:
        """Look at once; any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wanted.set)

    async def stop(self) -> None:
        """End every stream of samples."""
        async with self._changed:
            self._stopped = True
            self._changed.notify_all()

    async def samples(self) -> AsyncGenerator[Sample]:
        """Yield the latest sample, and each new one, until `stop`; a slow reader misses some.

        While a look takes long, it yields the latest one again: the reader tells its browser that the console is here.
        """
        self._watchers += 1
        if self._watchers == 1:
            self._wanted.set()
        seen = 0
        try:
            while not self._stopped:
                async with self._changed:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(BEAT):
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
        status, latency_s, error = None, None, None
        try:
            with self._database.session() as tables:
                before = self._before()
                status = read_status(tables, progress_timeout=self._settle_after, published_before=before)
                latency_s = read_latency(tables)
                self._paused = paused_jobs(tables, limit=PAUSED_NAMED, length=REASON_LENGTH)
        except OutboxError as failure:
            error = scrub(str(failure))
        except Exception as failure:  # the next look may go well
            error = "a fault of the console: see its log"
            log.error("console.look_failed", exc_info=failure)
        at = datetime.now(UTC)
        rate = self._keep(status, latency_s, at)
        sent_none = status is not None and self._sent_none(status)
        self._nodes = status.nodes if status else self._nodes
        return Sample(
            number=self._number,
            at=at,
            status=status,
            error=error,
            nodes=self._nodes,
            rate=rate,
            paused=self._paused,
            sent_none=sent_none,
            latency_s=latency_s,
            history=self._whole_history(),
        )

    def _whole_history(self) -> tuple[Point, ...]:
        begun, since = self._history[0].at, time.monotonic() - KEPT
        return (*(point for point in self._earlier if since <= point.at < begun), *self._history)

    def _sent_none(self, status: Status) -> bool:
        """Whether nothing was sent since the first look that saw rows wait for a route that does not work."""
        if not any(route.waiting and route.paused_at is None for route in status.quarantined_routes):
            self._published_when_broken = None
            return False
        if self._published_when_broken is None:
            self._published_when_broken = status.published_total
        return status.published_total == self._published_when_broken

    def _before(self) -> dict[str, int] | None:
        """Return what each relay had published when its counters have settled since; None if no look is so old."""
        limit = time.monotonic() - self._settle_after
        return next((nodes for at, _, nodes in reversed(self._looks) if at <= limit), None)

    def _keep(self, status: Status | None, latency_s: float | None, at: datetime) -> float | None:
        """Add a look to the history; return the rate."""
        now = time.monotonic()
        while self._history and self._history[0].at < now - KEPT:
            self._history.popleft()
        if status is None:
            self._looks.clear()
            self._add(Point(now, None, None, None, self._in_queues(), None, None))
            return None
        rate = self._rate(now, status.published_total)
        self._looks.append((now, status.published_total, published(status.nodes)))
        while self._looks and self._looks[0][0] < now - max(RATE_OVER, self._settle_after) - IDLE_INTERVAL:
            self._looks.popleft()
        self._add(
            Point(
                at=now,
                backlog=backlog(status),
                age_s=age_s(status, at) or 0.0,
                rate=rate,
                in_queues=self._in_queues(),
                parked=status.parked,
                latency_s=latency_s,
            )
        )
        return rate

    def _add(self, point: Point) -> None:
        if self._history and point.at - self._history[-1].at < POINT:
            self._history[-1] = _worse(self._history[-1], point)
        else:
            self._history.append(point)

    def _rate(self, now: float, total: int) -> float | None:
        """Return the messages a second since a look some seconds ago."""
        earlier = next((look for look in reversed(self._looks) if look[0] <= now - RATE_OVER), None)
        at, before, _ = earlier or (self._looks[0] if self._looks else (now, total, {}))
        return max(0, total - before) / (now - at) if now > at else None


def backlog(status: Status) -> int:
    """Return how many rows wait, also for a route."""
    return status.pending + status.quarantined


def age_s(status: Status, at: datetime) -> float | None:
    """Return how long the oldest row has waited, also for a route that is not paused; None when no row waits."""
    routes = status.quarantined_routes
    waited = [(at - each.oldest).total_seconds() for each in routes if each.oldest and each.paused_at is None]
    return max([*waited, *([] if status.oldest_pending_age_s is None else [status.oldest_pending_age_s])], default=None)


def _worse(one: Point, other: Point) -> Point:
    return replace(
        one,
        backlog=_highest(one.backlog, other.backlog),
        age_s=_highest(one.age_s, other.age_s),
        rate=_highest(one.rate, other.rate),
        in_queues=_highest(one.in_queues, other.in_queues),
        parked=_highest(one.parked, other.parked),
        latency_s=_highest(one.latency_s, other.latency_s),
    )


def _highest(*figures: Figure | None) -> Figure | None:
    return max((each for each in figures if each is not None), default=None)
