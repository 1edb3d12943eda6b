"""What the drop of a day does to writers and marks: `python -m bench.retention`. See docs/benchmarks.md."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import psycopg

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.error import BenchmarkError
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, Count, Figures, Shown, main, quantile
from bench.frame.servers import Servers, holding_snapshot, private_servers, require_space
from bench.frame.watch import value, wait_drained, watching
from bench.frame.writers import HEAD_START, PAYLOAD, write_steadily, writer_pool
from tests.support.days import ADD_DAY, NAME

LIMIT = 50.0  # milliseconds that a writer may wait for a lock while a day is dropped
ROWS_BESIDE = 1000  # in the day of a case whose waits do not depend on its size
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
BYTES_PER_ROW = 4 * table.PAYLOAD_BYTES  # of disk: the table and the write-ahead log

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
    SELECT application_name = 'outbox-relay/log', extract(epoch FROM clock_timestamp() - waitstart)::float8
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'relation' AND NOT granted AND waitstart IS NOT NULL
        AND application_name NOT IN ('outbox-relay retention', 'plain detach')
"""
WRITTEN = "SELECT count(*) FROM outbox.message WHERE state = 'sent' AND sent_at >= now() - interval '10 minutes'"
MARKS = """
    SELECT DISTINCT extract(epoch FROM sent_at)::float8 AS at FROM outbox.message
    WHERE state = 'sent' AND sent_at >= now() - interval '10 minutes' ORDER BY at
"""


def measure(*, rounds: Count = 1, rows: Count = 5_000_000, run: Bench) -> None:
    """Measure who waits while a day is dropped. Exit code 1 when a drop let a writer wait, or a message was lost.

    Parameters
    ----------
    rounds
        How often each case is measured.
    rows
        Sent rows of the day that is dropped.
    """
    titles = {
        "commit p50, ms": "commit_p50",
        "p99": "commit_p99",
        "longest": "commit_longest",
        "longest from mark to mark": "mark_gap",
        "writer waited": "writer_waited",
        "relay waited": "relay_waited",
    }
    waits = run.table(
        f"Writers and marks while a day of {rows:,} rows is dropped; milliseconds, the worst of all rounds",
        Column("drop, s", "seconds", 1, Shown.HIGHEST),
        *(Column(title, figure, 1, Shown.HIGHEST) for title, figure in titles.items()),
    )
    sizes = {NOTHING: ROWS_BESIDE, DROPPED: rows, HELD: ROWS_BESIDE, PLAIN_HELD: ROWS_BESIDE}
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers, writer_pool() as pool:
        waits.measure({case: partial(_measure, servers, pool, case, rows=size) for case, size in sizes.items()}, rounds)
    waited = max(one.figures["writer_waited"] for one in waits.taken if one.side in {DROPPED, HELD})
    if waited > LIMIT:
        run.fail(f"a writer waited {waited:.0f} ms for a drop, {LIMIT:.0f} may be")


@dataclass(slots=True)
class Waits:
    """The longest waits for a lock that were seen, in seconds."""

    writer: float = 0.0
    relay: float = 0.0


def _fill_day(servers: Servers, rows: int) -> str:
    """Make an old day of so many sent rows, and return the name of its table.

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


def _measure(servers: Servers, pool: ProcessPoolExecutor, case: str, *, rows: int) -> Figures:
    """Write at RATE under a running relay, do what the case says to a day of `rows` rows, and look at who waits."""
    queue.purge(servers.broker_url)
    name = _fill_day(servers, rows)
    act = _act(servers, case, name)
    with (
        BenchRelay(*servers.urls, servers.folder).running() as relay,
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
            wait_drained(watch, relay)
            marks = [at for (at,) in watch.execute(MARKS)]
            written = value(watch, WRITTEN)
    _clean(servers, name)
    counted = ended + AFTER / 2
    took = sorted(one.returned_at - one.asked_at for one in commits if began <= one.asked_at <= counted)
    if not took or commits[-1].returned_at < counted:
        raise BenchmarkError(f"the drop took {ended - began:.0f} s, and the writers did not write all the while")
    return {
        "seconds": ended - began,
        "commits": len(took),
        "commit_p50": quantile(took, 0.5) * 1000,
        "commit_p99": quantile(took, 0.99) * 1000,
        "commit_longest": took[-1] * 1000,
        "mark_gap": max(two - one for one, two in pairwise(marks) if one <= counted and two >= began) * 1000,
        "writer_waited": waits.writer * 1000,
        "relay_waited": waits.relay * 1000,
        "lost": max(0, written - queue.depth(servers.broker_url)),
    }


def _length(case: str, rows: int) -> float:
    """Return the seconds to write for: the wait for a lock, and the count of the rows."""
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


def _clean(servers: Servers, name: str) -> None:
    """Remove what is left of the day, and what was sent."""
    with watching(servers.database_url) as connection:
        connection.execute(f"DROP TABLE IF EXISTS outbox.{name}".encode())
        connection.execute("TRUNCATE outbox.message")


if __name__ == "__main__":
    main(measure)
