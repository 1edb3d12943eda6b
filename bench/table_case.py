"""What bench/table measures: drains with many sent rows kept, drains under an old snapshot, memory in a big backlog."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import LiteralString

import psycopg

from bench.drain_case import Measured, drain
from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Backlog
from bench.frame.error import BenchmarkError
from bench.frame.processes import peak_bytes
from bench.frame.relay_process import running_relay
from bench.frame.servers import Servers
from bench.frame.watch import watching
from relay.config.settings import Ordering
from tests.support.process import resident_bytes

NONE_RETAINED, RETAINED = "no sent rows", "sent rows retained"
NO_SNAPSHOT, SNAPSHOT = "no snapshot", "an old snapshot"

DAYS = 10  # over which the retained rows are spread; today is the last of them
KEYS = 20_000
LARGE_PAYLOAD_BYTES = 4096
MIB = 1 << 20

# Bytes of disk for each one of a payload: in the table, once more when the row moves to its day, in the write-ahead
# log, in the queue's log and its segments. 4.7 were seen.
DISK_PER_BYTE = 6

# A JSON text of a given length. Built from text: json_build_object takes several times as long.
HEAD, TAIL = '{"invoice":"', '"}'
NOTE = '","note":"'
NUMBER_DIGITS = 8

MAKE_DAYS = """
    SELECT outbox.make_day('message_sent', day)
    FROM (SELECT (now() AT TIME ZONE 'UTC')::date - %s + n FROM generate_series(1, %s + 2) AS n) AS wanted (day)
    WHERE outbox.attached_day('message_sent', day) IS NULL
"""

# In the order in which they would have been sent, as many a day. `lane` is generated.
RETAIN = """
    INSERT INTO outbox.message_sent
        (id, aggregate_type, aggregate_id, event_type, payload, created_at, state, sent_at)
    SELECT n, 'invoice', (n %% %(keys)s)::text, 'InvoiceIssued',
        (%(head)s || lpad(n::text, %(digits)s, '0') || %(rest)s)::json, sent_at, 'sent', sent_at
    FROM generate_series(1, %(rows)s) AS n
    CROSS JOIN LATERAL (
        SELECT midnight + (now() - midnight) * (n::float8 / %(rows)s) AS sent_at
        FROM (
            SELECT ((now() AT TIME ZONE 'UTC')::date - %(days)s + 1)::timestamp AT TIME ZONE 'UTC' AS midnight
        ) AS first_day
    ) AS moment
"""
# What autovacuum would do in the hours after; it must not fall into the measurement.
CLEAR_UP = "VACUUM (FREEZE, ANALYZE) outbox.message_sent"
GO_ON_ABOVE = "SELECT setval('outbox.message_id_seq', %s)"
EMPTY_PENDING = "TRUNCATE outbox.message_pending"

FILL_LARGE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'invoice', (n %% %(keys)s)::text, 'InvoiceIssued',
        (%(head)s || lpad(n::text, %(digits)s, '0') || %(rest)s)::json
    FROM generate_series(1, %(rows)s) AS n
"""

LOOK_AT_ALL = "SELECT count(*) FROM outbox.message"
CLEAR_PENDING = "VACUUM outbox.message_pending"
PENDING_BYTES = "SELECT pg_table_size('outbox.message_pending')"
PUBLISHED = "SELECT coalesce(sum(published_total), 0)::bigint FROM outbox.node"


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """A drain, and the size of the pending partition when it began, without the backlog itself: rows already dead."""

    measured: Measured
    dead_mib: float


@dataclass(slots=True)
class Course:
    """The relay's memory in the course of a drain; the first look is the idle relay's."""

    rows: int
    seconds: float = 0.0
    lost: int = 0
    peak: float = 0.0  # MiB, as the kernel has it
    published: list[int] = field(default_factory=list)  # as the relay's heartbeat has it: up to a second old
    resident: list[float] = field(default_factory=list)  # MiB, at the same looks

    def at(self, share: float) -> float:
        """Give the memory when this share of the rows was published."""
        looks = zip(self.published, self.resident, strict=True)
        return next((mib for count, mib in looks if count >= share * self.rows), self.resident[-1])


def retain(servers: Servers, rows: int) -> None:
    """Fill the last DAYS days with sent rows.

    Raises:
        BenchmarkError: the disk has no room for them.
    """
    require_space(servers.folder, rows * table.PAYLOAD_BYTES * DISK_PER_BYTE)
    with watching(servers.database_url) as connection:
        connection.execute(MAKE_DAYS, [DAYS, DAYS])
        connection.execute(RETAIN, {**_payload(table.PAYLOAD_BYTES), "keys": KEYS, "rows": rows, "days": DAYS})
        connection.execute(CLEAR_UP)


def measure_retained(servers: Servers, backlog: Backlog, number: int, *, retained: int, is_retained: bool) -> Measured:
    """Drain a backlog in a database that `retain` has filled, or in one that keeps nothing.

    In both, ids are above those of the retained rows. What is sent in the first is kept with them.
    """
    queue.purge(servers.broker_url)
    with psycopg.connect(servers.database_url) as connection:
        connection.execute(EMPTY_PENDING if is_retained else table.EMPTY)
        connection.execute(GO_ON_ABOVE, [retained])
    with (
        watching(servers.database_url) as watch,
        running_relay(servers.database_url, servers.broker_url, Ordering.KEY, log=_log(servers)) as relay,
    ):
        seconds, cpu = drain(servers, watch, relay, table.uncommitted(servers.database_url, backlog))
    name = RETAINED if is_retained else NONE_RETAINED
    return Measured.now(servers, name, number, messages=backlog.rows, seconds=seconds, cpu=cpu)


def measure_snapshot(servers: Servers, backlog: Backlog, number: int, *, is_held: bool) -> Snapshotted:
    """Drain a backlog twice with the same relay, and measure the second time.

    With `is_held` a snapshot is open all the while, taken before the first backlog was written; so the rows of the
    first drain are still there, dead, when the second begins. Without, a VACUUM between the two clears them away.

    Raises:
        BenchmarkError: the first drain lost a message.
    """
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=True)
    with (
        watching(servers.database_url) as watch,
        running_relay(servers.database_url, servers.broker_url, Ordering.KEY, log=_log(servers)) as relay,
        holding_snapshot(servers.database_url) if is_held else nullcontext(),
    ):
        drain(servers, watch, relay, table.uncommitted(servers.database_url, backlog))
        if (arrived := queue.depth(servers.broker_url)) < backlog.rows:
            raise BenchmarkError(f"of the {backlog.rows} messages before the measurement only {arrived} arrived")
        queue.purge(servers.broker_url)
        watch.execute(CLEAR_PENDING)
        dead_mib = _number(watch, PENDING_BYTES) / MIB
        seconds, cpu = drain(servers, watch, relay, table.uncommitted(servers.database_url, backlog))
    name = SNAPSHOT if is_held else NO_SNAPSHOT
    measured = Measured.now(servers, name, number, messages=backlog.rows, seconds=seconds, cpu=cpu)
    return Snapshotted(measured, dead_mib)


def measure_memory(servers: Servers, rows: int) -> Course:
    """Drain so many rows of 4 KiB that are committed at one moment, and look at the relay's memory all the while.

    The queue keeps all of them, so that a lost one is seen.

    Raises:
        BenchmarkError: the disk has no room for them.
    """
    require_space(servers.folder, rows * LARGE_PAYLOAD_BYTES * DISK_PER_BYTE)
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=True)
    course = Course(rows)
    with (
        watching(servers.database_url) as watch,
        running_relay(servers.database_url, servers.broker_url, Ordering.KEY, log=_log(servers)) as relay,
    ):
        earlier = _number(watch, PUBLISHED)

        def look() -> None:
            course.published.append(_number(watch, PUBLISHED) - earlier)
            course.resident.append(resident_bytes(relay.pid) / MIB)

        course.seconds, _ = drain(servers, watch, relay, _large(servers.database_url, rows), look=look)
        look()
        course.peak = peak_bytes(relay.pid) / MIB
    course.lost = max(0, rows - queue.depth(servers.broker_url))
    return course


@contextmanager
def holding_snapshot(database_url: str) -> Iterator[None]:
    """Hold a snapshot that has read, as a long report or a dump does."""
    with psycopg.connect(database_url, application_name="old snapshot") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute(LOOK_AT_ALL)
        yield
        connection.rollback()


def require_space(folder: Path, needed: int) -> None:
    """Make sure of room on the disk.

    Raises:
        BenchmarkError: there is less.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BenchmarkError(
            f"{free / 2**30:.0f} GiB are free, and this takes up to {needed / 2**30:.0f}: ask for fewer rows"
        )


@contextmanager
def _large(database_url: str, rows: int) -> Iterator[psycopg.Connection]:
    """Fill the table with rows of 4 KiB in a transaction that is still open when it is handed over."""
    with psycopg.connect(database_url) as connection:
        connection.execute(FILL_LARGE, {**_payload(LARGE_PAYLOAD_BYTES), "keys": KEYS, "rows": rows})
        connection.execute(table.RING)
        yield connection


def _payload(size: int) -> dict[str, str | int]:
    """Give what stands before and behind the number in a payload of this many bytes."""
    note = "n" * (size - len(HEAD) - NUMBER_DIGITS - len(NOTE) - len(TAIL))
    return {"head": HEAD, "digits": NUMBER_DIGITS, "rest": NOTE + note + TAIL}


def _log(servers: Servers) -> Path:
    return servers.folder / "relay.log"


def _number(connection: psycopg.Connection, query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None, "each of these queries gives a row"
    return int(row[0])
