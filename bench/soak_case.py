"""What bench/soak measures: how long each commit waits for its confirm, and what relay, table and broker grow to."""

import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psycopg

from bench.frame.error import BenchmarkError
from bench.frame.notes import NoteReader
from bench.frame.relay_process import running_relay
from bench.frame.report import quantile
from bench.frame.servers import Servers
from bench.frame.watch import wait_drained, watching
from bench.frame.writers import HEAD_START, start_batches, write_steadily, writer_pool
from bench.programs.taker import running_taker
from bench.soak_ledger import Ledger
from relay.config.settings import Ordering
from tests.support.process import Process, resident_bytes

MIB = 1 << 20
WARM_UP, WARM_UP_RATE = 3.0, 100.0  # seconds, rows a second: they do not count, and all writers are there then
# Autovacuum looks once a minute, and the table is as large as what has died until it comes. On a busy machine it may
# come so much later once, which is no growth.
VACUUM_LATE = 30.0  # seconds
DEAD_ROW = 620  # bytes, with its part of the index
ARRIVE_WITHIN = 60.0  # seconds, after the last row is marked

SIZES = """
    SELECT
        pg_total_relation_size('outbox.message_pending')::float8,
        coalesce((SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = 'outbox.message_pending'::regclass), 0),
        (SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('outbox.message_sent'))::float8,
        coalesce((SELECT sum(in_flight) FROM outbox.node), 0)
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at everything; sizes in MiB."""

    at: float  # seconds since the writers began
    relay: float
    rabbitmq: float
    pending: float  # the partition of pending rows, with its indexes
    dead_rows: int  # in it, as PostgreSQL's statistics have it
    sent: float  # all days of sent rows, with their indexes
    in_flight: int  # as the relay's heartbeat has it


@dataclass(frozen=True, slots=True)
class Minute:
    """The rows that were committed in a minute, or in another span of time."""

    rate: float  # rows a second
    p50: float  # milliseconds from COMMIT's answer to the confirm
    p99: float
    samples: Sequence[Sample]


@dataclass(slots=True)
class Soaked:
    """A whole run."""

    minutes: list[Minute]
    written: int
    lost: int  # committed, and never confirmed or never taken from the queue

    @property
    def samples(self) -> list[Sample]:
        return [sample for minute in self.minutes for sample in minute.samples]


@dataclass(frozen=True, slots=True)
class Growth:
    """A figure in the last third of a run, next to that in the second third: the medians."""

    name: str
    before: float
    after: float
    limit: float  # still flat

    @property
    def is_flat(self) -> bool:
        return self.after <= self.limit


@dataclass(slots=True)
class Course:
    """Collects a run, span after span."""

    begun_at: float  # Unix time
    seconds: float
    span: float  # seconds
    samples: list[Sample] = field(default_factory=list)
    waits: dict[int, "array[float]"] = field(default_factory=dict)  # milliseconds, by the number of the span

    def add(self, confirmed: Sequence[tuple[float, float]]) -> None:
        """Take note of rows, by their commits."""
        for committed_at, confirmed_at in confirmed:
            number = self._number(committed_at - self.begun_at)
            self.waits.setdefault(number, array("d")).append(1000 * (confirmed_at - committed_at))

    def minutes(self) -> list[Minute]:
        """Give the whole of it."""
        minutes = []
        for number, waits in sorted(self.waits.items()):
            length = min(self.span, self.seconds - number * self.span)
            ascending = sorted(waits)
            samples = [sample for sample in self.samples if self._number(sample.at) == number]
            minutes.append(Minute(len(waits) / length, quantile(ascending, 0.5), quantile(ascending, 0.99), samples))
        return minutes

    def _number(self, second: float) -> int:
        """Tell the span; a late writer's last rows count for the last one."""
        return int(max(0.0, min(second, self.seconds - 0.001)) // self.span)


def soak(
    servers: Servers, rate: float, seconds: float, *, interval: float, span: float, tell: Callable[[Sample], None]
) -> Soaked:
    """Let writers, relay and consumer work together; look at them every `interval` seconds.

    Raises:
        BenchmarkError: the relay or the consumer ended meanwhile, or the relay did not catch up.
    """
    confirms, taken = servers.folder / "confirms", servers.folder / "taken"
    with (
        watching(servers.database_url) as watch,
        writer_pool() as pool,
        running_taker(servers.broker_url, log=servers.folder / "taker.log", taken=taken) as taker,
        running_relay(
            servers.database_url,
            servers.broker_url,
            Ordering.KEY,
            log=servers.folder / "relay.log",
            confirms=confirms,
        ) as relay,
    ):
        write_steadily(pool, servers.database_url, WARM_UP_RATE, WARM_UP)
        course = Course(time.time() + HEAD_START, seconds, span)
        writers = start_batches(pool, servers.database_url, rate, seconds, servers.folder)
        ledger = Ledger([NoteReader(file) for file in writers], NoteReader(confirms), NoteReader(taken))
        while _are_writing(writers):
            time.sleep(interval)
            for process in (relay, taker):
                if not process.is_running():
                    raise BenchmarkError(f"{process.name} ended in the midst of it:\n{process.log_end()}")
            course.samples.append(sample := _look(servers, relay, watch, time.time() - course.begun_at))
            tell(sample)
            _read(ledger, course)
        wait_drained(watch, relay)
        deadline = time.monotonic() + ARRIVE_WITHIN
        while _read(ledger, course) and time.monotonic() < deadline:
            time.sleep(0.1)
    return Soaked(course.minutes(), ledger.written, ledger.missing)


def growths(soaked: Soaked, rate: float) -> list[Growth]:
    """Compare the last third with the second: the first one fills caches, and the table up to its first vacuum."""
    relay = _thirds([sample.relay for sample in soaked.samples])
    pending = _thirds([sample.pending for sample in soaked.samples])
    p99 = _thirds([minute.p99 for minute in soaked.minutes])
    late = VACUUM_LATE * rate * DEAD_ROW / MIB
    return [
        Growth("relay's memory, MiB", *relay, limit=relay[0] + min(5.0, 0.05 * relay[0])),
        Growth("pending rows, MiB", *pending, limit=pending[0] + max(late, 0.2 * pending[0])),
        Growth("p99, ms", *p99, limit=1.5 * p99[0]),
    ]


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return median(values[third : 2 * third] or values), median(values[-third:])


def _are_writing(writers: dict[Path, Future[None]]) -> bool:
    for work in writers.values():
        if work.done():
            work.result()  # raises what went wrong
    return not all(work.done() for work in writers.values())


def _read(ledger: Ledger, course: Course) -> int:
    """Read on, and tell how many rows are under way."""
    ledger.read()
    course.add(ledger.confirmed)
    ledger.confirmed.clear()
    return ledger.missing


def _look(servers: Servers, relay: Process, watch: psycopg.Connection, at: float) -> Sample:
    row = watch.execute(SIZES).fetchone()
    assert row is not None, "a query without FROM gives a row"
    pending, dead_rows, sent, in_flight = row
    return Sample(
        at=at,
        relay=resident_bytes(relay.pid) / MIB,
        rabbitmq=resident_bytes(servers.rabbitmq_pid) / MIB,
        pending=pending / MIB,
        dead_rows=int(dead_rows),
        sent=sent / MIB,
        in_flight=int(in_flight),
    )
