"""What a mark costs in each storage: `python -m bench.marks`. See docs/benchmarks.md.

A mark moves a pending row to the table of its day. A row of the log stays where it is, and one receipt names the rows
of a mark. Each side writes, reads and marks rows by the statements of the relay, in a backend whose CPU time is taken.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import LiteralString

import psycopg
from pydantic import SecretStr

from bench.frame.backlog import AGGREGATE_TYPE, EVENT_TYPE, SEED
from bench.frame.error import BenchmarkError
from bench.frame.processes import run_seconds
from bench.frame.run import Bench, Column, Count, CountOrNone, Figures, Positive, Run, Shown, main
from bench.frame.servers import new_database, require_space, without_autovacuum
from bench.frame.storage import Storage, use
from bench.frame.watch import WAL, value
from bench.frame.writers import INSERT_BATCH, KEYS, PAYLOAD, WRITERS, write_flat_out, writer_pool
from relay.config.settings import DatabaseSettings, KeyPolicy, Ordering, RelaySettings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.health import Health
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read.log_positions import LogLane, LogPlan, Snapshot
from relay.engine.read.pending import read_statement
from relay.engine.read.tail import Tail, log_parameters
from relay.engine.row import fetch_rows, give_rows
from relay.engine.session.database_retry import DatabaseRetry
from relay.engine.session.segments import SEGMENTS
from relay.engine.session.session import LANES, LaneSession, array_text
from relay.engine.settle.mark import MARK_LOGGED, mark_statement, receipts
from relay.operate.status import read_status
from tests.support.plans import EXPLAIN
from tests.support.postgres import PostgresServer

NODE = "bench"
ROWS_A_MARK = (10, 100, 1000)
MOST_MARKS = 1000  # of one side: each waits for the disk
ROWS_A_STATEMENT = 1000
FIRST_MARKS = 10  # of one row each: PostgreSQL plans the first ones by their values
GONE_WITHIN = 10.0  # seconds

NEAR = 1000  # rows that were sent just now: a read looks behind them for rows of transactions that ran
WINDOW = 1000
LANE_BYTES = 1 << 20
FIRST_READS, READS = 10, 100
LOOKS = 10  # of `relay status`
BYTES_A_SENT_ROW = 1500  # of disk: the row, its index entries and the WAL of both

EMPTY = "TRUNCATE outbox.message, outbox.published, outbox.receipt, outbox.checkpoint"
POSITION = "SELECT last_value - (NOT is_called)::integer FROM outbox.message_id_seq"
SNAPSHOT = "SELECT pg_current_snapshot()::text"
IS_GONE = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s"
DEAD = "SELECT coalesce(sum(n_dead_tup), 0)::float8 FROM pg_stat_user_tables WHERE schemaname = 'outbox'"

# Rows that were sent today, as many marks of a backlog have left them.
FILL: Mapping[Storage, LiteralString] = {
    Storage.PENDING: """
        INSERT INTO outbox.message_sent
            (id, aggregate_type, aggregate_id, event_type, payload, created_at, state, sent_at)
        SELECT nextval('outbox.message_id_seq'), 'invoice', (n %% 5000)::text, 'InvoiceIssued', %(payload)s::json,
            now(), 'sent', now()
        FROM generate_series(1, %(rows)s::bigint) AS n
    """,
    Storage.LOG: """
        INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'invoice', (n %% 5000)::text, 'InvoiceIssued', %(payload)s::json
        FROM generate_series(1, %(rows)s::bigint) AS n
    """,
}
NAME_ALL = """
    INSERT INTO outbox.receipt (block, n, node, ids)
    SELECT id >> 12, count(*), 'bench', array_agg(id ORDER BY id) FROM outbox.message_log GROUP BY id >> 12, id % 5
"""
# Where a relay would go on: all that is there is sent. The rows that are sent just now are not behind it.
CHECKPOINT = """
    INSERT INTO outbox.checkpoint (cluster, lanes, lows, seen_to, unseen, position)
    SELECT system_identifier, array_agg(lane), array_agg(%(low)s::bigint), min(pg_snapshot_xmax(seen)::text::bigint),
        '{}', %(low)s
    FROM pg_control_system(), pg_current_snapshot() AS seen, generate_series(0, 15) AS lane
    GROUP BY system_identifier
"""

Place = tuple[int, int]  # lane, id

# What a backlog's first read costs after a checkpoint: it notes in each page that the writers have committed.
PLACES: Mapping[Storage, LiteralString] = {
    Storage.PENDING: "SELECT lane, id FROM outbox.message_pending WHERE id > %s ORDER BY id",
    Storage.LOG: "SELECT lane, id FROM outbox.message_log WHERE id > %s ORDER BY id",
}


@dataclass(frozen=True, slots=True)
class Tables:
    """A database and the storage of its rows."""

    url: str
    storage: Storage

    @classmethod
    def make(cls, postgres: PostgresServer, storage: Storage, name: str = "bench") -> "Tables":
        """Make the database."""
        url = new_database(postgres, f"{storage}_{name}")
        use(storage, url)
        return cls(url, storage)

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
    vacuum_rounds: CountOrNone = 3,
    read_rounds: CountOrNone = 3,
    writer_rounds: CountOrNone = 5,
    rows: Count = 40_000,
    sent_rows: Count = 1_000_000,
    writer_seconds: Positive = 8.0,
    run: Bench,
) -> None:
    """Measure what rows and their marks cost PostgreSQL, among the pending rows and in the log.

    Parameters
    ----------
    mark_rounds
        Rounds of inserts and of marks of 10, 100 and 1,000 rows; 0 leaves them out.
    vacuum_rounds
        Rounds of VACUUM with and without checksums of pages; 0 leaves them out.
    read_rounds
        Rounds of read, mark, status and take-over with no sent rows and with many; 0 leaves them out.
    writer_rounds
        Rounds of writers flat out, without a relay; 0 leaves them out.
    rows
        Rows that a side writes and marks; of marks of 10 rows, 10,000 at most.
    sent_rows
        Rows that were sent on the same day, in front of those that are read.
    writer_seconds
        How long each side of the writers lasts.
    """
    with without_autovacuum(run, has_checksums=True) as postgres:
        tables = {storage: Tables.make(postgres, storage) for storage in Storage}
        if mark_rounds:
            _compare_marks(run, tables, rows, mark_rounds)
        if vacuum_rounds:
            _compare_vacuums(run, tables, rows, vacuum_rounds)
        if read_rounds:
            _compare_reads(run, postgres, sent_rows, read_rounds)
        if writer_rounds:
            with writer_pool() as writers:
                _compare_writers(run, tables, writers, seconds=writer_seconds, rounds=writer_rounds)


def _compare_marks(run: Run, tables: Mapping[Storage, Tables], rows: int, rounds: int) -> None:
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
        f"{storage}, {size} a mark": partial(measure_marks, each, min(rows, size * MOST_MARKS), size)
        for size in ROWS_A_MARK
        for storage, each in tables.items()
    }
    compared.measure(sides, rounds)


def _compare_vacuums(run: Run, tables: Mapping[Storage, Tables], rows: int, rounds: int) -> None:
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
        sides = {f"{storage}, checksums": each for storage, each in tables.items()}
        sides |= {f"{storage}, no checksums": Tables.make(server, storage) for storage in Storage}
        compared.measure({name: partial(measure_vacuum, each, rows) for name, each in sides.items()}, rounds)


def _compare_reads(run: Run, postgres: PostgresServer, sent_rows: int, rounds: int) -> None:
    compared = run.table(
        f"Behind sent rows of the same day: CPU of the backend in us. Reads of {WINDOW:,} rows of {LANES} lanes",
        Column("read, us a row", "read_cpu", 2),
        Column("buffers", "read_buffers", 2, Shown.MEDIAN),
        Column(f"behind {NEAR:,} sent just now", "near_cpu", 2),
        Column("buffers", "near_buffers", 2, Shown.MEDIAN),
        Column("nothing new, us a read", "empty_cpu", 0),
        Column("mark, us a row", "mark_cpu", 2),
        Column("status, us", "status_cpu", 0),
        Column("take-over, us", "take_over_cpu", 0),
    )
    require_space(Path(tempfile.gettempdir()), 2 * sent_rows * BYTES_A_SENT_ROW)
    with run.status(f"filling tables with {sent_rows:,} sent rows"):
        sides = {
            f"{storage}, {sent:,} sent rows": ReadTables.fill(Tables.make(postgres, storage, f"read_{sent}"), sent)
            for sent in (0, sent_rows)
            for storage in Storage
        }
    compared.measure({name: partial(measure_reads, each) for name, each in sides.items()}, rounds)


def _compare_writers(
    run: Run, tables: Mapping[Storage, Tables], writers: ProcessPoolExecutor, *, seconds: float, rounds: int
) -> None:
    compared = run.table(
        f"{WRITERS} writers flat out, without a relay",
        Column("commits/s", "rate"),
        Column("ratio", "rate", 3, is_ratio=True),
    )
    sides = {str(storage): partial(measure_writers, each, writers, seconds) for storage, each in tables.items()}
    compared.measure(sides, rounds)


def measure_writers(tables: Tables, writers: ProcessPoolExecutor, seconds: float) -> Figures:
    """Let the writers go as fast as they can."""
    _empty(tables)
    return {"rate": write_flat_out(writers, tables.url, seconds)}


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
        """Write rows as sent and vacuum, as autovacuum would; then send NEAR more, and write the rows to read."""
        _empty(tables)
        with tables.connect() as writer, tables.connect() as watch:
            if sent:
                watch.execute(FILL[tables.storage], {"rows": sent, "payload": PAYLOAD})
                if tables.storage is Storage.LOG:
                    watch.execute(NAME_ALL)
                watch.execute(f"VACUUM (FREEZE) {tables.storage.tables}".encode())
            low = value(watch, POSITION)
            watch.execute(CHECKPOINT, {"low": low})
            _write_sent(tables, writer, watch, NEAR)
            sent_to = value(watch, POSITION)
            _write(writer, watch, 2 * WINDOW)  # the lanes have not equally many
            return cls(tables, sent_to, value(watch, POSITION))


def measure_reads(filled: ReadTables) -> Figures:
    """Read, mark, look and take over, behind the sent rows.

    Read the first rows again and again: as they are, behind rows that were sent just now, and nothing at all. Then let
    a new session take over. At last write further rows and mark them.
    """
    return {**measure_status(filled), **asyncio.run(_measure_reads(filled)), **measure_marks_behind(filled)}


def measure_status(filled: ReadTables) -> dict[str, float]:
    """Look at the tables as `relay status` does."""
    with filled.tables.connect() as connection, filled.tables.connect() as watch:
        read_status(connection, "outbox")
        meter = Meter(watch, connection.info.backend_pid)
        for _ in range(LOOKS):
            read_status(connection, "outbox")
        return {"status_cpu": meter.figures("status", LOOKS)["status_cpu"]}


def measure_marks_behind(filled: ReadTables) -> dict[str, float]:
    """Write rows behind the others, and mark them in marks of 1,000."""
    with filled.tables.connect() as writer, filled.tables.connect() as watch:
        above = value(watch, POSITION)
        _write(writer, watch, 2 * WINDOW)
        places = _places(filled.tables, watch, above=above)
        return {"mark_cpu": asyncio.run(_mark(filled.tables, watch, places, max(ROWS_A_MARK)))["mark_cpu"]}


async def _measure_reads(filled: ReadTables) -> dict[str, float]:
    storage, sent_to = filled.tables.storage, filled.sent_to
    database = DatabaseSettings(url=SecretStr(filled.tables.url))
    figures: dict[str, float] = {}
    with filled.tables.connect() as watch:
        written_to = value(watch, POSITION)
        async with await LaneSession.open(database) as session:
            async with session.use() as connection:
                cursor = await connection.execute(session.sql(SEGMENTS))
                session.segments.learn(await cursor.fetchall())
            for name, low, floor, rows in (
                ("read", sent_to, sent_to, WINDOW // LANES * LANES),
                ("near", sent_to - NEAR, sent_to, WINDOW // LANES * LANES),
                ("empty", written_to, written_to, 0),
            ):
                seen = Snapshot.parse(value(watch, SNAPSHOT).encode())
                statement, asked = _asked(storage, session, seen, low=low, floor=floor)
                async with session.use() as connection:
                    await _read(connection, statement, asked, times=FIRST_READS, rows=rows)
                    meter = Meter(watch, session.pid)
                    await _read(connection, statement, asked, times=READS, rows=rows)
                    cpu = meter.figures(name, READS * (rows or 1))[f"{name}_cpu"]
                    row = await (await connection.execute(EXPLAIN.encode() + statement, asked)).fetchone()
                assert row is not None, "EXPLAIN gives a plan"
                buffers = row[0][0]["Plan"]["Shared Hit Blocks"] + row[0][0]["Plan"]["Shared Read Blocks"]
                figures |= {f"{name}_cpu": cpu, f"{name}_buffers": buffers / (rows or 1)}
        return {**figures, "take_over_cpu": await _take_over(database, 2 * WINDOW)}


async def _take_over(database: DatabaseSettings, rows: int) -> float:
    """Let a tail of a new session read rows that are not sent; return the CPU time of its backend in microseconds."""
    async with await LaneSession.open(database) as session:
        session.lanes.take(await lock_lanes(session))
        policy = DeliveryPolicy.of(Ordering.KEY, KeyPolicy.HOLD)
        retry = DatabaseRetry(session, Health(), drain=(drain := asyncio.Event()))
        tail = Tail(session, RelaySettings(), policy, retry)
        found = 0
        async with asyncio.timeout(GONE_WITHIN):
            async for window in tail.windows(until=drain):
                found += len(window)
                tail.forget(window)
                if found >= rows:
                    break
        return 1e6 * run_seconds(session.pid)


async def _read(
    connection: psycopg.AsyncConnection, statement: bytes, asked: Mapping[str, object], *, times: int, rows: int
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


def _asked(
    storage: Storage, session: LaneSession, seen: Snapshot, *, low: int, floor: int
) -> tuple[bytes, dict[str, object]]:
    """Return a read. It goes back to `low`; in the log, it looks from there for rows that were not seen."""
    asked: dict[str, object] = {
        "lanes": array_text(range(LANES)),
        "rows": WINDOW // LANES,
        "bytes": array_text([LANE_BYTES] * LANES),
        "held": "{}",
        "floors": array_text([low] * LANES),
    }
    most = RelaySettings().max_message_bytes
    if storage is Storage.PENDING:
        return read_statement(session, most), asked
    segments = tuple(session.segments.between(low + 1, floor + 1))
    lane = LogLane(floor, seen, base=low, low=low, near=low)
    plan = LogPlan([lane] * LANES, [segments[-1].past - 1] * LANES, segments)
    return read_statement(session, most, segments), asked | log_parameters(plan)


def _write_sent(tables: Tables, writer: psycopg.Connection, watch: psycopg.Connection, rows: int) -> None:
    above = value(watch, POSITION)
    _write(writer, watch, rows)
    asyncio.run(_mark(tables, watch, _places(tables, watch, above=above), max(ROWS_A_MARK)))


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
                connection.execute(f"{command} {tables.storage.tables}".encode())
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
    return [(lane, id_) for lane, id_ in watch.execute(PLACES[tables.storage], [above])]


def _empty(tables: Tables) -> None:
    with tables.connect() as connection:
        connection.execute(EMPTY)
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
        mark = _marker(session, tables.storage)
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


def _marker(session: LaneSession, storage: Storage) -> Callable[[Sequence[Place]], Awaitable[None]]:
    move, name = mark_statement(session), session.sql(MARK_LOGGED)

    async def mark(places: Sequence[Place]) -> None:
        async with session.use() as connection:
            if storage is Storage.PENDING:
                given = {"lanes": array_text(lane for lane, _ in places), "ids": array_text(id_ for _, id_ in places)}
                await connection.execute(move, given | {"node": NODE}, prepare=True)
            else:
                named = receipts(id_ for _, id_ in places)
                await connection.execute(name, named | {"node": NODE}, prepare=True)

    return mark


if __name__ == "__main__":
    main(measure)
