"""What the state of the table does to the relay: `python -m bench.table`. See docs/benchmarks.md.

Five measurements:

- the rate of a drain with ten million sent rows retained, next to one without;
- that with a snapshot held open, next to one without;
- how soon a relay sends that takes over from a killed one behind two million dead rows, next to no dead row;
- the start, drain and memory of a relay with a million keys that wait behind parked rows, next to one without;
- the relay's memory while it drains a million rows of 4 KiB.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import psycopg

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Backlog, Keys
from bench.frame.drains import CPU, RATE, clear, drain
from bench.frame.error import BenchmarkError
from bench.frame.processes import peak_bytes
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, Count, CountOrNone, Figures, main
from bench.frame.servers import Servers, holding_snapshot, private_servers, require_space, second_database
from bench.frame.watch import value, wait_until, watching
from relay.testing.servers.process import resident_bytes

DAYS = 10  # over which the retained rows are spread; today is the last of them
KEYS = 20_000
LARGE_PAYLOAD_BYTES = 4096
SHARES = (0.1, 0.5, 0.9)  # of the drain, after which the memory is told
MIB = 1 << 20

# Bytes of disk for each one of a payload. It lies in the table, again when the row moves to its day, in the
# write-ahead log, and in the queue's log and segments. 4.7 were seen.
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

CLEAR_PENDING = "VACUUM outbox.message_pending"
PENDING_BYTES = "SELECT pg_table_size('outbox.message_pending')"
FILL_SMALL = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'invoice', n::text, 'InvoiceIssued', '{}' FROM generate_series(1, %s) AS n
"""
DELETE_PENDING = "DELETE FROM outbox.message_pending"  # as marks do, but faster
PARK = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at)
    SELECT 'order', n::text, 'OrderPlaced', '{}', 'parked', now() FROM generate_series(1, %s) AS n
"""
FORGET_FLOORS = "DELETE FROM outbox.lane_floor"
ARE_SAVED = "SELECT min(floor) >= (SELECT last_value FROM outbox.message_id_seq) FROM outbox.lane_floor"
ARE_SENT = "SELECT count(*) = %s FROM outbox.message_sent"
ROWS_TO_TAKE = 400
PARKED_KEYS = 1_000_000

PUBLISHED = "SELECT coalesce(sum(published_total), 0)::bigint FROM outbox.node"


def measure(
    *,
    rows: Count = 200_000,
    retained_rounds: CountOrNone = 3,
    retained_rows: Count = 10_000_000,
    snapshot_rounds: CountOrNone = 3,
    take_over_rounds: CountOrNone = 3,
    dead_rows: Count = 2_000_000,
    parked_rounds: CountOrNone = 3,
    memory_rows: CountOrNone = 1_000_000,
    run: Bench,
) -> None:
    """Measure retained rows, an old snapshot, take-overs, parked keys, memory.

    Parameters
    ----------
    rows
        Rows in the backlog that is drained.
    retained_rounds
        Rounds of a drain with sent rows retained and one without; 0 leaves them out.
    retained_rows
        Sent rows retained.
    snapshot_rounds
        Rounds of a drain with a snapshot held open and one without; 0 leaves them out.
    take_over_rounds
        Rounds of a take-over behind dead rows and one without; 0 leaves them out.
    dead_rows
        Dead rows that a snapshot keeps, for the take-over.
    parked_rounds
        Rounds of a start and a drain with parked keys and one without; 0 leaves them out.
    memory_rows
        Rows of 4 KiB, drained while the relay's memory is looked at; 0 leaves it out. They take 24 KiB of disk each.
    """
    ratio = Column("ratio", "rate", 2, is_ratio=True)
    kept = run.table("Drained with sent rows retained, and without; CPU in us a message", RATE, ratio, *CPU)
    dead = Column("dead rows, MiB", "dead_mib", 1)
    held = run.table("Drained with a snapshot held open, and without; CPU in us a message", RATE, ratio, *CPU, dead)
    seconds = Column("seconds", "seconds", 2)
    taken = run.table(f"From the start of a relay to {ROWS_TO_TAKE} sent rows, when another was killed", seconds)
    parked = run.table(
        "Started and drained with parked keys, and without; memory in MiB, CPU in us a message",
        seconds,
        RATE,
        ratio,
        Column("peak", "peak", 1),
        *CPU,
    )
    after = (Column(f"after {share:.0%}", f"after {share:.0%}", 1) for share in SHARES)
    columns = (Column("idle, before", "idle", 1), *after, Column("peak", "peak", 1), RATE)
    memory = run.table("The relay's memory while it drains rows of 4 KiB, MiB", *columns)
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        if retained_rounds or snapshot_rounds or parked_rounds:
            with run.status("drawing the rows"):
                backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows)
        if retained_rounds:
            with second_database(servers, "retained") as filled:
                with run.status(f"filling a table with {retained_rows:,} sent rows"):
                    retain(filled, retained_rows)
                sides = {
                    "no sent rows": partial(measure_retained, servers, backlog, retained_rows, is_retained=False),
                    f"{retained_rows:,} sent rows": partial(
                        measure_retained, filled, backlog, retained_rows, is_retained=True
                    ),
                }
                kept.measure(sides, retained_rounds)
        if snapshot_rounds:
            snapshot = partial(measure_snapshot, servers, backlog)
            sides = {
                "no snapshot": partial(snapshot, is_held=False),
                "an old snapshot": partial(snapshot, is_held=True),
            }
            held.measure(sides, snapshot_rounds)
        if take_over_rounds:
            sides = {
                "no dead rows": partial(measure_take_over, servers, 0),
                f"{dead_rows:,} dead rows": partial(measure_take_over, servers, dead_rows),
            }
            taken.measure(sides, take_over_rounds)
        if parked_rounds:
            with second_database(servers, "parked") as filled:
                with run.status(f"parking rows of {PARKED_KEYS:,} keys"), watching(filled.database_url) as connection:
                    connection.execute(PARK, [PARKED_KEYS])
                    connection.execute("VACUUM (ANALYZE) outbox.message_parked")
                sides = {
                    "no parked key": partial(measure_parked, servers, backlog),
                    f"{PARKED_KEYS:,} parked keys": partial(measure_parked, filled, backlog),
                }
                parked.measure(sides, parked_rounds)
        if memory_rows:
            memory.measure({f"{memory_rows:,} rows": partial(measure_memory, servers, memory_rows)}, rounds=1)


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


def measure_retained(servers: Servers, backlog: Backlog, retained: int, *, is_retained: bool) -> Figures:
    """Drain a backlog in a database that `retain` has filled, or in one that keeps nothing.

    In both, ids are above those of the retained rows. What is sent in the first is kept with them.
    """
    queue.purge(servers.broker_url)
    with psycopg.connect(servers.database_url) as connection:
        connection.execute(EMPTY_PENDING if is_retained else table.EMPTY)
        connection.execute(GO_ON_ABOVE, [retained])
    with watching(servers.database_url) as watch, BenchRelay(*servers.urls, servers.folder).running() as relay:
        return drain(servers, watch, [relay], table.uncommitted(servers.database_url, backlog), rows=backlog.rows)


def measure_snapshot(servers: Servers, backlog: Backlog, *, is_held: bool) -> Figures:
    """Drain a backlog twice with the same relay, and measure the second time.

    With `is_held` a snapshot is open all the while, taken before the first backlog was written. So the rows of the
    first drain are still there, dead, when the second begins. Without, a VACUUM between the two clears them away.

    Raises:
        BenchmarkError: the first drain lost a message.
    """
    clear(servers, same_ids=True)
    with (
        watching(servers.database_url) as watch,
        BenchRelay(*servers.urls, servers.folder).running() as relay,
        holding_snapshot(servers.database_url) if is_held else nullcontext(),
    ):
        first = drain(servers, watch, [relay], table.uncommitted(servers.database_url, backlog), rows=backlog.rows)
        if first["lost"]:
            raise BenchmarkError(f"of the {backlog.rows} messages before the measurement {first['lost']:.0f} were lost")
        queue.purge(servers.broker_url)
        watch.execute(CLEAR_PENDING)
        dead_mib = value(watch, PENDING_BYTES) / MIB
        second = drain(servers, watch, [relay], table.uncommitted(servers.database_url, backlog), rows=backlog.rows)
        return {**second, "dead_mib": dead_mib}


def measure_take_over(servers: Servers, dead: int) -> Figures:
    """Kill a relay behind so many dead rows that a snapshot keeps, and time the start of the next one."""
    clear(servers, same_ids=True)
    relay = BenchRelay(*servers.urls, servers.folder)
    with watching(servers.database_url) as watch, holding_snapshot(servers.database_url):
        watch.execute(FORGET_FLOORS)
        first = relay.start()
        try:
            with watch.transaction():
                watch.execute(FILL_SMALL, [dead])
                watch.execute(DELETE_PENDING)
            watch.execute(FILL_SMALL, [ROWS_TO_TAKE])
            wait_until(lambda: value(watch, ARE_SENT, [ROWS_TO_TAKE]) and value(watch, ARE_SAVED), first)
        finally:
            first.stop(signal.SIGKILL)
        watch.execute(FILL_SMALL, [ROWS_TO_TAKE])
        started = time.monotonic()
        with relay.running() as second:
            sent = wait_until(lambda: value(watch, ARE_SENT, [2 * ROWS_TO_TAKE]), second)
        return {"seconds": sent - started}


def measure_parked(servers: Servers, backlog: Backlog) -> Figures:
    """Time the start of a relay to its first sent rows, then drain a backlog, in a database as it is prepared."""
    queue.purge(servers.broker_url)
    with watching(servers.database_url) as watch:
        watch.execute(EMPTY_PENDING)
        watch.execute(FILL_SMALL, [ROWS_TO_TAKE])
        before = value(watch, "SELECT count(*) FROM outbox.message_sent")
        started = time.monotonic()
        with BenchRelay(*servers.urls, servers.folder).running() as relay:
            sent = wait_until(lambda: value(watch, ARE_SENT, [before + ROWS_TO_TAKE]), relay)
            queue.purge(servers.broker_url)
            writing = table.uncommitted(servers.database_url, backlog)
            drained = drain(servers, watch, [relay], writing, rows=backlog.rows)
            return {"seconds": sent - started, **drained, "peak": peak_bytes(relay.pid) / MIB}


def measure_memory(servers: Servers, rows: int) -> Figures:
    """Drain so many rows of 4 KiB that are committed at one moment, and look at the relay's memory all the while.

    The queue keeps all of them, so that a lost one is seen. The first look is at the idle relay.

    Raises:
        BenchmarkError: the disk has no room for them.
    """
    require_space(servers.folder, rows * LARGE_PAYLOAD_BYTES * DISK_PER_BYTE)
    clear(servers, same_ids=True)
    looks: list[tuple[int, float]] = []  # published, as the relay's heartbeat has it: up to a second old; MiB
    with watching(servers.database_url) as watch, BenchRelay(*servers.urls, servers.folder).running() as relay:
        earlier = value(watch, PUBLISHED)

        def look() -> None:
            looks.append((value(watch, PUBLISHED) - earlier, resident_bytes(relay.pid) / MIB))

        drained = drain(servers, watch, [relay], _large(servers.database_url, rows), rows=rows, look=look)
        look()
        peak = peak_bytes(relay.pid) / MIB
    after = {f"after {share:.0%}": memory_after(looks, share * rows) for share in SHARES}
    return {**drained, "idle": looks[0][1], **after, "peak": peak, "looks": len(looks)}


def memory_after(looks: list[tuple[int, float]], rows: float) -> float:
    """Return the memory when so many rows were published."""
    return next((mib for published, mib in looks if published >= rows), looks[-1][1])


@contextmanager
def _large(database_url: str, rows: int) -> Iterator[psycopg.Connection]:
    """Fill the table with rows of 4 KiB in a transaction that is still open when it is handed over."""
    with psycopg.connect(database_url) as connection:
        connection.execute(FILL_LARGE, {**_payload(LARGE_PAYLOAD_BYTES), "keys": KEYS, "rows": rows})
        connection.execute(table.RING)
        yield connection


def _payload(size: int) -> dict[str, str | int]:
    """Return what stands before and behind the number in a payload of this many bytes."""
    note = "n" * (size - len(HEAD) - NUMBER_DIGITS - len(NOTE) - len(TAIL))
    return {"head": HEAD, "digits": NUMBER_DIGITS, "rest": NOTE + note + TAIL}


if __name__ == "__main__":
    main(measure)
