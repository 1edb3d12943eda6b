"""What an hour of steady traffic does to relay, table and broker: `python -m bench.soak`. See docs/benchmarks.md.

Writers commit, the relay carries, a consumer takes. A line a minute tells how long commits waited for their confirms
and how large everything was. The end tells whether memory and table stay as they are.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psycopg

from bench.frame import backlog as table
from bench.frame.error import BenchmarkError
from bench.frame.notes import Note, NoteReader
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, Positive, ResultTable, main, quantile
from bench.frame.servers import Servers, private_servers
from bench.frame.watch import wait_drained, watching
from bench.frame.writers import BATCH, HEAD_START, WRITERS, start_batches, write_steadily, writer_pool
from bench.programs.taker import running_taker
from relay.testing.servers.process import Process, resident_bytes

MINUTE = 60.0
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
    is_judged: bool = True

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
        """Return the whole of it."""
        minutes = []
        for number, waits in sorted(self.waits.items()):
            length = min(self.span, self.seconds - number * self.span)
            ascending = sorted(waits)
            samples = [sample for sample in self.samples if self._number(sample.at) == number]
            minutes.append(Minute(len(waits) / length, quantile(ascending, 0.5), quantile(ascending, 0.99), samples))
        return minutes

    def _number(self, second: float) -> int:
        """Return the span; a late writer's last rows count for the last one."""
        return int(max(0.0, min(second, self.seconds - 0.001)) // self.span)


class Ledger:
    """Reads all notes, and keeps no more than what is still under way.

    Attributes:
        written: rows that were committed.
        confirmed: commit and confirm (Unix time) of each row since the reader last took them out.
    """

    def __init__(self, commits: Sequence[NoteReader], confirms: NoteReader, taken: NoteReader) -> None:
        self._commits, self._confirms, self._taken = commits, confirms, taken
        self._unconfirmed, self._untaken = Awaited(), Awaited()
        self.written = 0
        self.confirmed: list[tuple[float, float]] = []

    def read(self) -> None:
        """Read on."""
        for commits in self._commits:
            fresh = commits.read()
            self.written += len(fresh)
            self.confirmed += self._unconfirmed.expect(fresh)
            self._untaken.expect(fresh)
        self.confirmed += self._unconfirmed.see(self._confirms.read())
        self._untaken.see(self._taken.read())

    @property
    def missing(self) -> int:
        """Rows that were committed and not confirmed, or not taken."""
        return len(self._unconfirmed.ids | self._untaken.ids)


class Awaited:
    """Rows that were committed and of which something else is still to be seen."""

    def __init__(self) -> None:
        self._committed_at: dict[int, float] = {}
        # Seen before their commit, as files are read one after the other; or a repeat, or of the warm-up.
        self._early: dict[int, float] = {}

    def expect(self, commits: list[Note]) -> list[tuple[float, float]]:
        """Return, as `see` does, what was seen before."""
        self._committed_at.update(commits)
        return self.see([(id_, self._early.pop(id_)) for id_, _ in commits if id_ in self._early])

    def see(self, notes: list[Note]) -> list[tuple[float, float]]:
        """Return the commit of each row and when it was seen, each once."""
        seen = []
        for id_, at in notes:
            if (committed_at := self._committed_at.pop(id_, None)) is None:
                self._early[id_] = at
            else:
                seen.append((committed_at, at))
        return seen

    @property
    def ids(self) -> set[int]:
        return set(self._committed_at)


def measure(
    *, minutes: Positive = 60.0, rate: Positive = 2000.0, interval: Positive = 5.0, check: bool = False, run: Bench
) -> None:
    """Measure a long run: memory, table, waits. Exit code 1 when a message was lost.

    Parameters
    ----------
    minutes
        How long it lasts.
    rate
        Rows a second, from eight writers together.
    interval
        Seconds between two looks at memory and table.
    check
        Exit with 1 also when memory or table are not flat; waits are only told, as they depend on the machine.
    """
    titles = {
        "rows/s": ("rate", 0),
        "p50 ms": ("p50", 1),
        "p99 ms": ("p99", 1),
        "relay MiB": ("relay", 1),
        "in flight": ("in_flight", 0),
        "pending MiB": ("pending", 1),
        "dead rows": ("dead_rows", 0),
        "sent MiB": ("sent", 0),
        "RabbitMQ MiB": ("rabbitmq", 0),
    }
    title = f"{WRITERS} writers, {BATCH} rows a transaction: medians of each minute, in flight the most"
    columns = (Column(title, *figure) for title, figure in titles.items())
    of_minutes = run.table(title, *columns, is_drawn=False)
    whole = run.table("The whole run", Column("rows", "rows"), is_drawn=False)
    growth = run.table(
        "Medians of the last third next to the second",
        *(Column(title, title, 1) for title in ("second third", "last third", "at most")),
        Column("flat: 1", "is_flat"),
        is_drawn=False,
    )
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers, run.status("") as status:

        def tell(sample: Sample) -> None:
            status.update(f"{sample.at / MINUTE:.1f} of {minutes:g} minutes, relay {sample.relay:.0f} MiB")

        soaked = soak(servers, rate, minutes * MINUTE, interval=interval, span=MINUTE, tell=tell)
    whole.add("written", {"rows": soaked.written, "lost": soaked.lost})
    _report(soaked, of_minutes)
    for one in growths(soaked, rate):
        figures = {"second third": one.before, "last third": one.after, "at most": one.limit, "is_flat": one.is_flat}
        growth.add(one.name, figures)
        if check and one.is_judged and not one.is_flat:
            run.fail(f"{one.name}: {one.after:.1f} in the last third, {one.limit:.1f} at most")
    at = [sample.at / MINUTE for sample in soaked.samples]
    middles = [number + 0.5 for number in range(len(soaked.minutes))]
    memory, pending, flight = (
        {name: (at, [getattr(one, name) for one in soaked.samples]) for name in names}
        for names in (("relay", "rabbitmq"), ("pending",), ("in_flight",))
    )
    run.draw("Memory, MiB", **memory)
    run.draw("Partition of pending rows with its indexes, MiB", **pending)
    waits = {name: (middles, [getattr(one, name) for one in soaked.minutes]) for name in ("p50", "p99")}
    run.draw("Commit to confirm, ms", **waits)
    run.draw("Messages in flight at the heartbeat", **flight)


def _report(soaked: Soaked, of_minutes: ResultTable) -> None:
    names = ("relay", "pending", "dead_rows", "sent", "rabbitmq")
    for number, minute in enumerate(soaked.minutes, start=1):
        looks = minute.samples
        medians = {name: median(getattr(one, name) for one in looks) for name in names} if looks else {}
        most = {"in_flight": max(one.in_flight for one in looks)} if looks else {}
        waits = {"rate": minute.rate, "p50": minute.p50, "p99": minute.p99}
        of_minutes.add(f"minute {number}", {**waits, **medians, **most})


def soak(
    servers: Servers, rate: float, seconds: float, *, interval: float, span: float, tell: Callable[[Sample], None]
) -> Soaked:
    """Let writers, relay and consumer work together; look at them every `interval` seconds.

    Raises:
        BenchmarkError: the relay or the consumer ended meanwhile, or the relay did not catch up.
    """
    noted, taken = BenchRelay(*servers.urls, servers.folder, is_noted=True), servers.folder / "taken"
    with (
        watching(servers.database_url) as watch,
        writer_pool() as pool,
        running_taker(servers.broker_url, log=servers.folder / "taker.log", taken=taken) as taker,
        noted.running() as relay,
    ):
        write_steadily(pool, servers.database_url, WARM_UP_RATE, WARM_UP)
        course = Course(time.time() + HEAD_START, seconds, span)
        writers = start_batches(pool, servers.database_url, rate, seconds, folder=servers.folder)
        ledger = Ledger([NoteReader(file) for file in writers], noted.confirms, NoteReader(taken))
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
        Growth("p99, ms", *p99, limit=1.5 * p99[0], is_judged=False),
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
    """Read on, and return how many rows are under way."""
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


if __name__ == "__main__":
    main(measure)
