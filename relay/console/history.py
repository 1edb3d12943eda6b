"""The curves of the last hour, kept over a restart, and those of each route and event type.

They need a table: no other one knows how the backlog was, and sent rows have no index by time to count them by.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, NamedTuple, Self

from psycopg.sql import SQL
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from relay.config.settings import Settings
from relay.console import sampler
from relay.console.database import Database
from relay.console.sampler import Point, Sampler
from relay.engine.send.routes import Router
from relay.errors import OutboxError
from relay.logger import get_logger
from relay.operate.throughput import Kind, SentCounter
from relay.runtime.scrub import scrub
from relay.servers.postgres.tables import Tables

NAMED = 100  # routes, and event types, that each ten seconds name
SHARE = 10  # a step may take this part of the time
WRITTEN = 2  # points: the last one, and the one before, to which a look may have added

log = get_logger(__name__)

# Two consoles write the same ten seconds: the worse figure stays, and what both count is the same.
SAVE = SQL("""
    WITH gone AS (
        DELETE FROM {schema}.console_history
        WHERE at < now() - %(kept)s * interval '1 second' OR at > now() + %(point)s * interval '1 second'
    )
    INSERT INTO {schema}.console_history AS known (at, backlog, age_s, rate, in_queues, parked, latency_s, sent)
    SELECT date_bin(%(point)s * interval '1 second', now() - %(ago)s * interval '1 second', '2000-01-01Z'),
        %(backlog)s, %(age_s)s, %(rate)s, %(in_queues)s, %(parked)s, %(latency_s)s, %(sent)s::jsonb
    ON CONFLICT (at) DO UPDATE SET
        backlog = greatest(known.backlog, excluded.backlog), age_s = greatest(known.age_s, excluded.age_s),
        rate = greatest(known.rate, excluded.rate), in_queues = greatest(known.in_queues, excluded.in_queues),
        parked = greatest(known.parked, excluded.parked), latency_s = greatest(known.latency_s, excluded.latency_s),
        sent = coalesce(excluded.sent, known.sent)
""")
LOAD = SQL("""
    SELECT extract(epoch FROM now() - at)::float8, backlog, age_s, rate, in_queues, parked, latency_s, sent::text
    FROM {schema}.console_history
    WHERE at BETWEEN now() - %(kept)s * interval '1 second' AND now()
    ORDER BY at
""")


class SentRoute(NamedTuple):
    """An address; its routing key has `{aggregate_id}` where the settings put that."""

    exchange: str
    routing_key: str


class EventType(NamedTuple):
    name: str


Name = SentRoute | EventType


@dataclass(frozen=True, slots=True)
class Sent:
    """What went out in some seconds, in messages a second: the busiest routes and event types.

    Attributes:
        at: monotonic.
    """

    at: float
    routes: Mapping[Name, float]
    types: Mapping[Name, float]

    def rate(self, name: Name) -> float | None:
        """Return the messages a second of one; None where others were busier."""
        among = self.routes if isinstance(name, SentRoute) else self.types
        return among.get(name, 0.0 if len(among) < NAMED else None)


_Rate = Annotated[float, Field(ge=0, le=1e12)]


class _Written(BaseModel):
    """What the table has of it."""

    routes: list[tuple[str, str, _Rate]]
    types: list[tuple[str, _Rate]]

    @classmethod
    def of(cls, sent: Sent) -> Self:
        return cls(
            routes=[(*name, rate) for name, rate in sent.routes.items() if isinstance(name, SentRoute)],
            types=[(*name, rate) for name, rate in sent.types.items() if isinstance(name, EventType)],
        )


@dataclass(frozen=True, slots=True)
class Busy:
    """A route or an event type of which something was sent in the last hour."""

    name: Name
    messages: float  # in all seconds that were counted
    rate: float | None  # of the last ones


@dataclass(frozen=True, slots=True)
class SentHour:
    """What went out in the last hour, as far as it was counted; the busiest first."""

    sent: Sequence[Sent] = ()
    routes: Sequence[Busy] = ()
    types: Sequence[Busy] = ()


class CurveHistory:
    """Counts what goes out, and keeps it in the table with the sampler's figures.

    Attributes:
        hour: what was counted, also by an earlier console.
    """

    def __init__(self, settings: Settings, database: Database, sampler: Sampler) -> None:
        self._router = Router.of(settings)
        self._database = database
        self._sampler = sampler
        self._counter = SentCounter()
        self._is_loaded = False
        self._is_failing = False
        self.hour = SentHour()

    async def run(self) -> None:
        """Count and keep, until cancelled. Curves go on in memory while the table cannot be had."""
        while True:
            begun = time.monotonic()
            try:
                await run_in_threadpool(self._step)
                self._is_failing = False
            except OutboxError as error:
                if not self._is_failing:
                    log.warning("console.history_not_kept", error=scrub(str(error)))
                self._is_failing = True
            took = time.monotonic() - begun
            await asyncio.sleep(max(sampler.POINT, took * SHARE) - took)

    def _step(self) -> None:
        """Count what was sent since the last step, and write it; called in a thread, and never twice at once."""
        with self._database.session() as tables:
            counted = self._counter.count(tables)
            sent = None if counted is None else _sent(self._router, counted)
            self.hour = _hour([*self.hour.sent, *([sent] if sent else [])])
            if not self._is_loaded:
                self._load(tables)
            latest = self._sampler.latest
            points = latest.history[-WRITTEN:] if latest else ()
            for point in points:
                _save(tables, point, sent if point is points[-1] else None)

    def _load(self, tables: Tables) -> None:
        """Take what an earlier console has written, up to what this one knows."""
        now = time.monotonic()
        points, sent = [], []
        for ago, *figures, busiest in tables.execute(LOAD, {"kept": sampler.KEPT}):
            points.append(Point(now - ago, *figures))
            if busiest is not None:
                sent += _read(now - ago, busiest)
        self._sampler.restore(points)
        own = self.hour.sent
        self.hour = _hour([*(each for each in sent if not own or each.at < own[0].at), *own])
        self._is_loaded = True


def _save(tables: Tables, point: Point, sent: Sent | None) -> None:
    known = asdict(point)
    ago = time.monotonic() - known.pop("at")
    # A writer's clock may be ahead: a row is then sent before it was written.
    figures = {name: None if figure is None else max(0, figure) for name, figure in known.items()}
    values = {
        "kept": sampler.KEPT,
        "point": sampler.POINT,
        "ago": ago,
        "sent": None if sent is None else _Written.of(sent).model_dump_json(),
        **figures,
    }
    tables.execute(SAVE, values)


def _sent(router: Router, counted: Mapping[Kind, float]) -> Sent:
    routes: defaultdict[Name, float] = defaultdict(float)
    types: defaultdict[Name, float] = defaultdict(float)
    for kind, rate in counted.items():
        routes[SentRoute(*router.address_of_kind(*kind))] += rate
        types[EventType(kind[-1])] += rate
    return Sent(time.monotonic(), _busiest(routes), _busiest(types))


def _busiest(rates: Mapping[Name, float]) -> dict[Name, float]:
    found = sorted(rates.items(), key=lambda each: (-each[1], each[0]))[:NAMED]
    return {name: round(rate, 3) for name, rate in found}


def _read(at: float, text: str) -> list[Sent]:
    """Return what another console has written; nothing if that is no form that we know."""
    try:
        written = _Written.model_validate_json(text)
    except ValidationError:
        return []
    routes: dict[Name, float] = {SentRoute(*name): rate for *name, rate in written.routes[:NAMED]}
    types: dict[Name, float] = {EventType(name): rate for name, rate in written.types[:NAMED]}
    return [Sent(at, routes, types)]


def _hour(sent: Iterable[Sent]) -> SentHour:
    """Return what is not older than an hour, with its totals."""
    since = time.monotonic() - sampler.KEPT
    kept = [each for each in sent if each.at >= since]
    return SentHour(kept, _totals(kept, lambda each: each.routes), _totals(kept, lambda each: each.types))


def _totals(sent: Sequence[Sent], of: Callable[[Sent], Mapping[Name, float]]) -> list[Busy]:
    messages: defaultdict[Name, float] = defaultdict(float)
    for each in sent:
        for name, rate in of(each).items():
            messages[name] += rate * sampler.POINT
    found = sorted(messages.items(), key=lambda each: (-each[1], each[0]))
    return [Busy(name, total, sent[-1].rate(name)) for name, total in found]
