"""What bench/retention measures: writers and marks while a day is dropped, and how long anybody waits for a lock."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import LiteralString

import psycopg

from bench.frame import queue
from bench.frame.backlog import PAYLOAD_BYTES
from bench.frame.error import BenchmarkError
from bench.frame.relay_process import running_relay
from bench.frame.report import quantile
from bench.frame.servers import Servers
from bench.frame.watch import watching
from bench.frame.writers import HEAD_START, PAYLOAD, write_steadily
from bench.table_case import holding_snapshot, require_space
from relay.config.settings import Ordering
from tests.support.days import ADD_DAY, NAME

NOTHING = "nothing is dropped"
DROPPED = "a day is dropped"
HELD = "a day is dropped behind a snapshot"
PLAIN_HELD = "plain DETACH behind a snapshot"

AGO = 20  # days; older than the 14 that are kept
RATE = 500.0  # rows a second, of all writers
WARM_UP = 2.0  # seconds of writing that do not count, so that the writers have started
SETTLED = 1.0  # seconds of the writing that counts before the drop
AFTER = 2.0  # seconds behind its end that count, too
LOOK = 0.005  # seconds between two looks at the locks
LONGEST = 300.0  # seconds that a drop may take
PLAIN_PATIENCE = "1s"
BYTES_PER_ROW = 4 * PAYLOAD_BYTES  # of disk: the table and the write-ahead log

FILL = """
    INSERT INTO outbox.message_sent (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT 'invoice', (n %% 20000)::text, 'InvoiceIssued', %(payload)s::json, 'sent',
        %(midnight)s + interval '1 day' * (n::float8 / (%(rows)s + 1))
    FROM generate_series(1, %(rows)s) AS n
"""
CLEAR_UP = "VACUUM (FREEZE, ANALYZE) outbox.message_sent"
PLAIN_DETACH = "ALTER TABLE outbox.message_sent DETACH PARTITION outbox.{}"

# Since when who waits for a table; the drop itself does, on purpose.
WAITS = """
    SELECT application_name = 'outbox-relay', extract(epoch FROM clock_timestamp() - waitstart)::float8
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'relation' AND NOT granted AND waitstart IS NOT NULL
        AND application_name NOT IN ('outbox-relay retention', 'plain detach')
"""
PENDING = "SELECT count(*) FROM outbox.message_pending"
WRITTEN = "SELECT count(*) FROM outbox.message WHERE state = 'sent' AND sent_at >= now() - interval '10 minutes'"
MARKS = """
    SELECT DISTINCT extract(epoch FROM sent_at)::float8 AS at FROM outbox.message
    WHERE state = 'sent' AND sent_at >= now() - interval '10 minutes' ORDER BY at
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One case of one round; times in milliseconds."""

    case: str
    round: int
    rows: int  # of the day
    seconds: float  # that the drop took
    commits: int
    commit_p50: float
    commit_p99: float
    commit_longest: float
    mark_gap: float  # longest time from one mark to the next
    writer_waited: float  # longest wait of a writer for a lock
    relay_waited: float
    lost: int


@dataclass(slots=True)
class Waits:
    """The longest waits for a lock that were seen, in seconds."""

    writer: float = 0.0
    relay: float = 0.0


def fill_day(servers: Servers, rows: int) -> str:
    """Make an old day of so many sent rows, and give the name of its table.

    Raises:
        BenchmarkError: the disk has no room for them.
    """
    require_space(servers.folder, rows * BYTES_PER_ROW)
    with watching(servers.database_url) as connection:
        (midnight,) = connection.execute(ADD_DAY, {"ago": AGO}).fetchone() or (None,)
        connection.execute(FILL, {"payload": PAYLOAD, "midnight": midnight, "rows": rows})
        connection.execute(CLEAR_UP)
        (name,) = connection.execute(NAME, ["message_sent", AGO]).fetchone() or ("",)
    return str(name)


def measure(servers: Servers, pool: ProcessPoolExecutor, case: str, number: int, *, rows: int) -> Measured:
    """Write at RATE under a running relay, do what the case says to a day of `rows` rows, and look at who waits."""
    queue.purge(servers.broker_url)
    name = fill_day(servers, rows)
    log = servers.folder / "relay.log"
    act = _act(servers, case, name)
    with (
        running_relay(servers.database_url, servers.broker_url, Ordering.KEY, log=log),
        ThreadPoolExecutor(1) as beside,
        holding_snapshot(servers.database_url) if case in (HELD, PLAIN_HELD) else nullcontext(),
    ):
        write_steadily(pool, servers.database_url, RATE, WARM_UP)  # their processes start meanwhile
        writing = beside.submit(write_steadily, pool, servers.database_url, RATE, SETTLED + _length(case, rows) + AFTER)
        time.sleep(HEAD_START + SETTLED)
        with _looking(servers.database_url) as waits:
            began = time.time()
            act()
            ended = time.time()
            time.sleep(AFTER)
        commits = writing.result()
        with watching(servers.database_url) as watch:
            _wait_marked(watch)
            marks = [at for (at,) in watch.execute(MARKS)]
            written = _number(watch, WRITTEN)
    _clean(servers, name)
    counted = ended + AFTER / 2
    took = sorted(one.returned_at - one.asked_at for one in commits if began <= one.asked_at <= counted)
    if not took or commits[-1].returned_at < counted:
        raise BenchmarkError(f"the drop took {ended - began:.0f} s, and the writers did not write all the while")
    return Measured(
        case,
        number,
        rows,
        seconds=ended - began,
        commits=len(took),
        commit_p50=quantile(took, 0.5) * 1000,
        commit_p99=quantile(took, 0.99) * 1000,
        commit_longest=took[-1] * 1000,
        mark_gap=max(two - one for one, two in pairwise(marks) if one <= counted and two >= began) * 1000,
        writer_waited=waits.writer * 1000,
        relay_waited=waits.relay * 1000,
        lost=max(0, written - queue.depth(servers.broker_url)),
    )


def _length(case: str, rows: int) -> float:
    """Give the seconds to write for: the wait for a lock, and the count of the rows."""
    return {NOTHING: 10.0, DROPPED: 15.0 + rows / 200_000, HELD: 25.0, PLAIN_HELD: 10.0}[case]


def _act(servers: Servers, case: str, name: str) -> Callable[[], None]:
    def nothing() -> None:
        time.sleep(_length(case, 0) - AFTER)

    def drop() -> None:
        command = [str(Path(sys.executable).parent / "relay"), "retention", "--database-url", servers.database_url]
        command += ["--yes", "--why", "benchmark"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
        if (done.returncode == 0) is (case == HELD):
            raise BenchmarkError(f"relay retention ended with {done.returncode}: {done.stdout}{done.stderr}")

    def plain() -> None:
        with psycopg.connect(servers.database_url, autocommit=True, application_name="plain detach") as connection:
            connection.execute(f"SET lock_timeout = '{PLAIN_PATIENCE}'".encode())
            try:
                connection.execute(PLAIN_DETACH.format(name).encode())
            except psycopg.errors.LockNotAvailable:
                return
        raise BenchmarkError("the snapshot was in nobody's way")

    return {NOTHING: nothing, DROPPED: drop, HELD: drop, PLAIN_HELD: plain}[case]


@contextmanager
def _looking(database_url: str) -> Iterator[Waits]:
    """Look at the locks until the end of the block."""
    waits, ended = Waits(), threading.Event()

    def look() -> None:
        with watching(database_url) as connection:
            while not ended.wait(LOOK):
                for is_relay, seconds in connection.execute(WAITS):
                    if is_relay:
                        waits.relay = max(waits.relay, seconds)
                    else:
                        waits.writer = max(waits.writer, seconds)

    with ThreadPoolExecutor(1) as beside:
        looking = beside.submit(look)
        try:
            yield waits
        finally:
            ended.set()
        looking.result()


def _wait_marked(watch: psycopg.Connection) -> None:
    deadline = time.monotonic() + LONGEST
    while _number(watch, PENDING):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"rows are still pending after {LONGEST:g} s")
        time.sleep(0.05)


def _clean(servers: Servers, name: str) -> None:
    """Remove what is left of the day, and what was sent."""
    with watching(servers.database_url) as connection:
        connection.execute(f"DROP TABLE IF EXISTS outbox.{name}".encode())
        connection.execute("TRUNCATE outbox.message")


def _number(connection: psycopg.Connection, query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None, "each of these queries gives a row"
    return int(row[0])
