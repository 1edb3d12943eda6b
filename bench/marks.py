"""What a mark costs, today's and by receipts: `python -m bench.marks`. See docs/benchmarks.md.

Today a mark moves each row from `message_pending` to its day. By receipts (bench/frame/receipts.py) the row stays, and
one small row names the ids of a mark. Each side writes rows, reads and marks them as the relay does, in a backend whose
CPU time is taken. Then whole relays drain a backlog, one of which reads a log and marks by receipts.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import LiteralString

import psycopg
from pydantic import SecretStr

from bench.frame import reference
from bench.frame.backlog import AGGREGATE_TYPE, EVENT_TYPE, ROUTING_KEY, SEED, Backlog, Keys, prepare, uncommitted
from bench.frame.drains import CPU, RATE, clear, drain, drain_backlog, publish_backlog
from bench.frame.error import BenchmarkError
from bench.frame.processes import run_seconds
from bench.frame.receipts import (
    BLOCK_BITS,
    MARK_RECEIPTS,
    PLAN_ONCE,
    SEGMENT,
    Sight,
    Snapshot,
    TransactionId,
    make_log,
    read_log_statement,
    receipts,
    sight_parameters,
)
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, Count, CountOrNone, Figures, Run, Shown, main
from bench.frame.servers import Servers, new_database, private_servers, second_database, without_autovacuum
from bench.frame.watch import value, wait_until, watching
from bench.frame.writers import INSERT_BATCH, KEYS, PAYLOAD
from relay.config.settings import DatabaseSettings, Ordering, RelaySettings
from relay.engine.read.pending import read_statement
from relay.engine.row import fetch_rows, give_rows
from relay.engine.session.session import LANES, LaneSession, array_text
from relay.engine.settle.mark import mark_statement
from tests.support.plans import EXPLAIN
from tests.support.postgres import PostgresServer
from tests.support.process import Process

NODE = "bench"
ROWS_A_MARK = (10, 100, 1000)
MOST_MARKS = 1000  # of one side: each waits for the disk
ROWS_A_STATEMENT = 1000
FIRST_MARKS = 10  # of one row each: PostgreSQL plans the first ones by their values
GONE_WITHIN = 10.0  # seconds

FEW_SENT = 1000
NEAR = 1000  # rows that were sent just now: a read looks behind them for rows of transactions that ran
WINDOW = 1000
LANE_BYTES = 1 << 20
FIRST_READS, READS = 10, 100

EMPTY = "TRUNCATE outbox.message, outbox.published"
EMPTY_RECEIPTS = "TRUNCATE outbox.receipt"
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8"
POSITION = "SELECT last_value - (NOT is_called)::integer FROM outbox.message_id_seq"
SNAPSHOT = "SELECT pg_current_snapshot()::text"
NAMED = "SELECT coalesce(sum(n), 0)::bigint FROM outbox.receipt"
IS_GONE = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s"
DEAD = "SELECT coalesce(sum(n_dead_tup), 0)::float8 FROM pg_stat_user_tables WHERE schemaname = 'outbox'"

Place = tuple[int, int]  # lane, id


class Way(StrEnum):
    """How rows are marked."""

    MOVE = "today"
    RECEIPTS = "receipts"


# What a backlog's first read costs after a checkpoint: it notes in each page that the writers have committed.
PLACES: Mapping[Way, LiteralString] = {
    Way.MOVE: "SELECT lane, id FROM outbox.message_pending WHERE id > %s ORDER BY id",
    Way.RECEIPTS: f"SELECT lane, id FROM outbox.{SEGMENT} WHERE id > %s ORDER BY id",
}
VACUUMED: Mapping[Way, LiteralString] = {
    Way.MOVE: "outbox.message_pending, outbox.message_sent",
    Way.RECEIPTS: "outbox.message_log, outbox.receipt",
}


@dataclass(frozen=True, slots=True)
class Tables:
    """A database and how rows are marked in it."""

    url: str
    way: Way

    @classmethod
    def make(
        cls, postgres: PostgresServer, way: Way, name: str = "", *, xid: TransactionId = TransactionId.BIGINT
    ) -> "Tables":
        """Make the database."""
        url = new_database(postgres, f"{way}_{name or xid.name.lower()}")
        if way is Way.RECEIPTS:
            make_log(url, xid)
        return cls(url, way)

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(self.url, autocommit=True, application_name="bench")


class Meter:
    """The CPU time of one backend and the server's WAL since it was made."""

    def __init__(self, watch: psycopg.Connection, pid: int) -> None:
        self._watch, self._pid = watch, pid
        self._wal = value(watch, WAL)
        self._cpu = run_seconds(pid)

    def figures(self, name: str, rows: int) -> dict[str, float]:
        """Return microseconds and bytes a row, as `NAME_cpu` and `NAME_wal`."""
        cpu = run_seconds(self._pid) - self._cpu
        return {f"{name}_cpu": 1e6 * cpu / rows, f"{name}_wal": (value(self._watch, WAL) - self._wal) / rows}


def measure(
    *,
    mark_rounds: CountOrNone = 3,
    insert_rounds: CountOrNone = 3,
    vacuum_rounds: CountOrNone = 3,
    read_rounds: CountOrNone = 3,
    drain_rounds: CountOrNone = 3,
    rows: Count = 40_000,
    sent_rows: Count = 100_000,
    drain_rows: Count = 200_000,
    run: Bench,
) -> None:
    """Measure what a mark costs PostgreSQL by moving rows and by receipts.

    Parameters
    ----------
    mark_rounds
        Rounds of marks of 10, 100 and 1,000 rows; 0 leaves them out.
    insert_rounds
        Rounds of inserts alone, by what a row keeps of its transaction; 0 leaves them out.
    vacuum_rounds
        Rounds of VACUUM with and without checksums of pages; 0 leaves them out.
    read_rounds
        Rounds of reads with few and with many sent rows in front; 0 leaves them out.
    drain_rounds
        Rounds of a drain by the C client, today's relay and one with receipts; 0 leaves them out.
    rows
        Rows that a side writes and marks; of marks of 10 rows, 10,000 at most.
    sent_rows
        Sent rows in front of those that are read: up to 16,000,000, which fill a segment.
    drain_rows
        Rows in the backlog that is drained.
    """
    if mark_rounds or insert_rounds or vacuum_rounds or read_rounds:
        with without_autovacuum(run, has_checksums=True) as postgres:
            tables = {way: Tables.make(postgres, way) for way in Way}
            if mark_rounds:
                _compare_marks(run, tables, rows, mark_rounds)
            if insert_rounds:
                _compare_inserts(run, postgres, tables, rows, insert_rounds)
            if vacuum_rounds:
                _compare_vacuums(run, tables, rows, vacuum_rounds)
            if read_rounds:
                _compare_reads(run, postgres, sent_rows, read_rounds)
    if drain_rounds:
        _compare_drains(run, drain_rows, drain_rounds)


def _compare_marks(run: Run, tables: Mapping[Way, Tables], rows: int, rounds: int) -> None:
    compared = run.table(
        "Rows written and marked; CPU of the backend in us a row, WAL in bytes a row",
        Column("mark: CPU", "mark_cpu", 2),
        Column("WAL", "mark_wal", 0, Shown.MEDIAN),
        Column("behind a checkpoint: CPU", "late_mark_cpu", 2),
        Column("WAL", "late_mark_wal", 0, Shown.MEDIAN),
        Column("WAL of its first read", "late_read_wal", 0, Shown.MEDIAN),
        Column("insert: CPU", "insert_cpu", 2),
        Column("WAL", "insert_wal", 0, Shown.MEDIAN),
        Column("dead rows", "dead", 2, Shown.MEDIAN),
    )
    sides = {
        f"{way}, {size} a mark": partial(measure_marks, each, min(rows, size * MOST_MARKS), size)
        for size in ROWS_A_MARK
        for way, each in tables.items()
    }
    compared.measure(sides, rounds)


def _compare_inserts(run: Run, postgres: PostgresServer, tables: Mapping[Way, Tables], rows: int, rounds: int) -> None:
    compared = run.table(
        "Rows written, 1,000 a statement, by what the row keeps of its transaction; us and bytes a row",
        Column("CPU", "insert_cpu", 2),
        Column("WAL", "insert_wal", 1),
    )
    sides = {"today": tables[Way.MOVE], "log, bigint": tables[Way.RECEIPTS]}
    for xid in (TransactionId.XID8, TransactionId.MISSING):
        sides[f"log, {xid.name.lower()}"] = Tables.make(postgres, Way.RECEIPTS, xid=xid)
    compared.measure({name: partial(measure_insert, each, rows) for name, each in sides.items()}, rounds)


def _compare_vacuums(run: Run, tables: Mapping[Way, Tables], rows: int, rounds: int) -> None:
    compared = run.table(
        "VACUUM of rows that are marked, 1,000 a mark; us and bytes a row",
        Column("VACUUM: CPU", "vacuum_cpu", 2, Shown.MEDIAN),
        Column("WAL", "vacuum_wal", 0, Shown.MEDIAN),
        Column("behind a checkpoint: CPU", "late_vacuum_cpu", 2, Shown.MEDIAN),
        Column("WAL", "late_vacuum_wal", 0, Shown.MEDIAN),
        Column("FREEZE: CPU", "freeze_cpu", 2, Shown.MEDIAN),
        Column("WAL", "freeze_wal", 0, Shown.MEDIAN),
        Column("behind a checkpoint: CPU", "late_freeze_cpu", 2, Shown.MEDIAN),
        Column("WAL", "late_freeze_wal", 0, Shown.MEDIAN),
        Column("all WAL, times the insert's", "total", 2, Shown.MEDIAN),
        Column("behind a checkpoint", "late_total", 2, Shown.MEDIAN),
    )
    with without_autovacuum(run, has_checksums=False) as server:
        sides = {f"{way}, checksums": each for way, each in tables.items()}
        sides |= {f"{way}, no checksums": Tables.make(server, way) for way in Way}
        compared.measure({name: partial(measure_vacuum, each, rows) for name, each in sides.items()}, rounds)


def _compare_reads(run: Run, postgres: PostgresServer, sent_rows: int, rounds: int) -> None:
    compared = run.table(
        f"Reads of {WINDOW:,} rows of {LANES} lanes; CPU of the backend in us, buffers",
        Column("us a row", "read_cpu", 2),
        Column("buffers", "read_buffers", 2, Shown.MEDIAN),
        Column(f"behind {NEAR:,} sent just now: us a row", "near_cpu", 2),
        Column("buffers", "near_buffers", 2, Shown.MEDIAN),
        Column("nothing new: us a read", "empty_cpu", 0),
        Column("buffers", "empty_buffers", 0, Shown.MEDIAN),
    )
    with run.status(f"filling tables with {sent_rows:,} sent rows"):
        sides = {
            f"{way}, {sent:,} sent rows": ReadTables.fill(Tables.make(postgres, way, f"read_{sent}"), sent)
            for sent in (FEW_SENT, sent_rows)
            for way in Way
        }
    compared.measure({name: partial(measure_reads, each) for name, each in sides.items()}, rounds)


def _compare_drains(run: Run, rows: int, rounds: int) -> None:
    compared = run.table(
        "Backlog drained; CPU of each process in us a message",
        RATE,
        Column("of C", "rate", 2, is_ratio=True),
        Column("relay and PostgreSQL", "both_cpu", 1),
        *CPU,
    )
    with private_servers(run, routing_key=ROUTING_KEY) as servers, second_database(servers, "log") as log:
        make_log(log.database_url)
        with run.status("drawing the rows"):
            backlog = prepare(servers.database_url, servers.folder, Keys.CDNOW, rows)
        sides = {reference.NAME: partial(publish_backlog, servers, backlog, reference.build(servers.folder))}
        for ordering in (Ordering.KEY, Ordering.PIPELINED):
            sides[f"today, {ordering}"] = partial(measure_drain, Way.MOVE, servers, backlog, ordering)
            sides[f"receipts, {ordering}"] = partial(measure_drain, Way.RECEIPTS, log, backlog, ordering)
        compared.measure(sides, rounds)


def measure_drain(way: Way, servers: Servers, backlog: Backlog, ordering: Ordering = Ordering.KEY) -> Figures:
    """Let a relay drain a backlog by one of the ways.

    Raises:
        BenchmarkError: a row was marked twice.
    """
    relay = BenchRelay(*servers.urls, servers.folder, ordering, by_receipts=way is Way.RECEIPTS)
    if way is Way.MOVE:
        figures = drain_backlog(servers, backlog, relay)
    else:
        with watching(servers.database_url) as watch:
            watch.execute(EMPTY_RECEIPTS)
            clear(servers, same_ids=True)
            with relay.running() as process:
                writing = uncommitted(servers.database_url, backlog)
                figures = drain(servers, watch, [process], writing, backlog.rows, wait=_wait_named(backlog.rows))
            if value(watch, NAMED) != backlog.rows:
                raise BenchmarkError("receipts name a row twice")
    return {**figures, "both_cpu": figures["sender_cpu"] + figures["postgres_cpu"]}


def _wait_named(rows: int) -> Callable[..., float]:
    """Return what waits until receipts name so many rows."""

    def wait(watch: psycopg.Connection, relay: Process, *, look: Callable[[], None]) -> float:
        return wait_until(lambda: value(watch, NAMED) >= rows, relay, look=look)

    return wait


def measure_marks(tables: Tables, rows: int, size: int) -> Figures:
    """Write rows and mark `size` of them at a time: at once, and behind a checkpoint as a backlog is marked."""
    at_once = _write_and_mark(tables, rows, size)
    late = _write_and_mark(tables, rows, size, is_behind_checkpoint=True)
    return {**at_once, **{f"late_{name}": figure for name, figure in late.items()}}


@dataclass(frozen=True, slots=True)
class ReadTables:
    """Tables with rows to read, behind NEAR sent rows whose index entries are still there, behind many more."""

    tables: Tables
    sent_to: int  # the highest id of a sent row
    written_to: int

    @classmethod
    def fill(cls, tables: Tables, sent: int) -> "ReadTables":
        """Write and mark rows and vacuum, as autovacuum would; then NEAR more, and at last the rows to read."""
        _empty(tables)
        with tables.connect() as writer, tables.connect() as watch:
            _write_sent(tables, writer, watch, sent)
            watch.execute(f"VACUUM {VACUUMED[tables.way]}".encode())
            _write_sent(tables, writer, watch, NEAR)
            sent_to = value(watch, POSITION)
            _write(writer, watch, 2 * WINDOW)  # the lanes have not equally many
            return cls(tables, sent_to, value(watch, POSITION))


def measure_reads(filled: ReadTables) -> Figures:
    """Read the first rows again and again: as they are, behind rows that were sent just now, and nothing at all."""
    return asyncio.run(_measure_reads(filled))


async def _measure_reads(filled: ReadTables) -> Figures:
    way, sent_to, written_to = filled.tables.way, filled.sent_to, filled.written_to
    make = read_statement if way is Way.MOVE else read_log_statement
    database = DatabaseSettings(url=SecretStr(filled.tables.url))
    figures: dict[str, float] = {}
    with filled.tables.connect() as watch:
        async with await LaneSession.open(database) as session:
            statement = make(session, RelaySettings().max_message_bytes)
            if way is Way.RECEIPTS:
                async with session.use() as connection:
                    await connection.execute(PLAN_ONCE)
            for name, low, floor, rows in (
                ("read", sent_to, sent_to, WINDOW // LANES * LANES),
                ("near", sent_to - NEAR, sent_to, WINDOW // LANES * LANES),
                ("empty", written_to, written_to, 0),
            ):
                asked = _asked(way, watch, low=low, floor=floor)
                async with session.use() as connection:
                    await _read(connection, statement, asked, FIRST_READS, rows)
                    meter = Meter(watch, session.pid)
                    await _read(connection, statement, asked, READS, rows)
                    cpu = meter.figures(name, READS * (rows or 1))[f"{name}_cpu"]
                    row = await (await connection.execute(EXPLAIN.encode() + statement, asked)).fetchone()
                assert row is not None, "EXPLAIN gives a plan"
                buffers = row[0][0]["Plan"]["Shared Hit Blocks"] + row[0][0]["Plan"]["Shared Read Blocks"]
                figures |= {f"{name}_cpu": cpu, f"{name}_buffers": buffers / (rows or 1)}
    return figures


async def _read(
    connection: psycopg.AsyncConnection, statement: bytes, asked: Mapping[str, object], times: int, rows: int
) -> None:
    """Read as the tail does.

    Raises:
        BenchmarkError: another number of rows came than there is to read.
    """
    cursor = connection.cursor(binary=True)
    give_rows(cursor)
    for _ in range(times):
        await cursor.execute(statement, asked, prepare=True)
        _, *found = await fetch_rows(cursor)
        if len(found) != rows:
            raise BenchmarkError(f"a read brought {len(found)} rows instead of {rows}")


def _asked(way: Way, watch: psycopg.Connection, *, low: int, floor: int) -> dict[str, object]:
    """Return what a read asks for. Today it goes back to `low`; in the log it looks from there for unseen rows only."""
    sight = Sight()
    sight.floor, sight.seen = floor, Snapshot.of(value(watch, SNAPSHOT))
    asked = {
        "lanes": array_text(range(LANES)),
        "rows": WINDOW // LANES,
        "bytes": array_text([LANE_BYTES] * LANES),
        "held": "{}",
    }
    lows = [low] * LANES
    return asked | ({"floors": array_text(lows)} if way is Way.MOVE else sight_parameters([sight] * LANES, lows))


def _write_sent(tables: Tables, writer: psycopg.Connection, watch: psycopg.Connection, rows: int) -> None:
    above = value(watch, POSITION)
    _write(writer, watch, rows)
    asyncio.run(_mark(tables, watch, _places(tables, watch, above=above), max(ROWS_A_MARK)))


def measure_insert(tables: Tables, rows: int) -> Figures:
    """Write rows."""
    _empty(tables)
    with tables.connect() as writer, tables.connect() as watch:
        return _write(writer, watch, rows)


def measure_vacuum(tables: Tables, rows: int) -> Figures:
    """Write and mark rows and vacuum them, four times: with and without FREEZE, at once and behind a checkpoint."""
    figures: dict[str, float] = {}
    for name, command in (("vacuum", "VACUUM"), ("freeze", "VACUUM (FREEZE)")):
        for when in ("", "late_"):
            figures |= _write_and_mark(tables, rows, max(ROWS_A_MARK))
            with tables.connect() as connection:
                if when:
                    connection.execute("CHECKPOINT")
                meter = Meter(connection, connection.info.backend_pid)
                connection.execute(f"{command} {VACUUMED[tables.way]}".encode())
                figures |= meter.figures(f"{when}{name}", rows)
    written = figures["insert_wal"] + figures["read_wal"] + figures["mark_wal"]
    for when in ("", "late_"):
        figures[f"{when}total"] = (written + figures[f"{when}freeze_wal"]) / figures["insert_wal"]
    return figures


def _write_and_mark(tables: Tables, rows: int, size: int, *, is_behind_checkpoint: bool = False) -> dict[str, float]:
    _empty(tables)
    with tables.connect() as writer, tables.connect() as watch:
        figures = _write(writer, watch, rows)
        if is_behind_checkpoint:
            watch.execute("CHECKPOINT")
        reading = Meter(watch, watch.info.backend_pid)
        places = _places(tables, watch)
        figures |= reading.figures("read", rows)
        if len(places) != rows:
            raise BenchmarkError(f"{len(places)} rows are to be marked, and {rows} were written")
        return {**figures, **asyncio.run(_mark(tables, watch, places, size)), "dead": value(watch, DEAD) / rows}


def _places(tables: Tables, watch: psycopg.Connection, *, above: int = 0) -> list[Place]:
    return [(lane, id_) for lane, id_ in watch.execute(PLACES[tables.way], [above])]


def _empty(tables: Tables) -> None:
    with tables.connect() as connection:
        connection.execute(EMPTY)
        if tables.way is Way.RECEIPTS:
            connection.execute(EMPTY_RECEIPTS)
        connection.execute("CHECKPOINT")


def _write(writer: psycopg.Connection, watch: psycopg.Connection, rows: int) -> dict[str, float]:
    meter, numbers = Meter(watch, writer.info.backend_pid), random.Random(SEED)
    for start in range(0, rows, ROWS_A_STATEMENT):
        keys = [str(numbers.randrange(KEYS)) for _ in range(min(ROWS_A_STATEMENT, rows - start))]
        values = {"aggregate_type": AGGREGATE_TYPE, "event_type": EVENT_TYPE, "payload": PAYLOAD, "keys": keys}
        writer.execute(INSERT_BATCH, values, prepare=True)
    return meter.figures("insert", rows)


async def _mark(tables: Tables, watch: psycopg.Connection, places: Sequence[Place], size: int) -> dict[str, float]:
    """Mark rows on a session of the relay, the first few of them alone and unmeasured."""
    first, others = places[:FIRST_MARKS], places[FIRST_MARKS:]
    async with await LaneSession.open(DatabaseSettings(url=SecretStr(tables.url))) as session:
        mark = _marker(session, tables.way)
        for place in first:
            await mark([place])
        pid = session.pid
        meter = Meter(watch, pid)
        for start in range(0, len(others), size):
            await mark(others[start : start + size])
        figures = meter.figures("mark", len(others))
    deadline = time.monotonic() + GONE_WITHIN
    while not value(watch, IS_GONE, [pid]):  # only then its dead rows are counted
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the session of the marks is still there after {GONE_WITHIN:g} s")
        await asyncio.sleep(0.01)
    return figures


def _marker(session: LaneSession, way: Way) -> Callable[[Sequence[Place]], Awaitable[None]]:
    move, name = mark_statement(session), session.sql(MARK_RECEIPTS, bits=BLOCK_BITS)

    async def mark(places: Sequence[Place]) -> None:
        async with session.use() as connection:
            if way is Way.MOVE:
                given = {"lanes": array_text(lane for lane, _ in places), "ids": array_text(id_ for _, id_ in places)}
                await connection.execute(move, given | {"node": NODE}, prepare=True)
            else:
                await connection.execute(name, receipts([id_ for _, id_ in places], NODE), prepare=True)

    return mark


if __name__ == "__main__":
    main(measure)
