"""How long a commit waits for its confirm: `python -m bench.latency`; also what the relay costs while it waits.

Four measurements, one after the other:

- commit to confirm under a steady load of overlapping transactions;
- the same next to rows that cannot be delivered;
- CPU of relay and database with nothing to do;
- the commit rate of writers who write as fast as they can, with the wake-up trigger and without.

See docs/benchmarks.md.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from itertools import product

import psycopg

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import EVENT_TYPE
from bench.frame.drains import COST, clear
from bench.frame.run import Bench, Column, CountOrNone, Figures, Positive, PositiveOrNone, Shown, main, quantile
from bench.frame.servers import private_servers
from bench.frame.storage import Storage, WhichStorage, stored
from bench.frame.watch import WAL, value, wait_drained
from bench.frame.watched_relay import WatchedRelay, watched_relay
from bench.frame.writers import WRITERS, Commit, write_flat_out, write_steadily
from relay.config.settings import Ordering

WARM_UP = 3.0  # seconds of the same load before the first round: statements prepared, caches filled
QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}
FROM_ANSWER = "from COMMIT's answer"
SENT = "SELECT id, extract(epoch FROM sent_at)::float8 FROM outbox.message_state WHERE state = 'sent'"
ENABLE, DISABLE = (f"ALTER TABLE outbox.message {verb} TRIGGER ring".encode() for verb in ("ENABLE", "DISABLE"))

INTERVAL, KEYS = 0.1, 10  # seconds between two transactions of undeliverable rows, and the keys of the rows in each
FULL, NOWHERE = "bench.full", "bench.nowhere"  # queues: the one takes no message, the other is not there
UNSENDABLE = '{"' + "x" * 129 + '": true}'  # no AMQP header may have so long a name
WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key, headers)
    SELECT 'guilty', key::text, %(event_type)s, '1', %(exchange)s, %(routing_key)s, %(headers)s
    FROM generate_series(1, %(keys)s) AS key
"""
FORGET = "DELETE FROM outbox.message WHERE aggregate_type = 'guilty'"


class Guilt(StrEnum):
    """Why rows cannot be delivered."""

    QUEUE = "a queue is full"  # it refuses each message: backoff, then quarantine
    ROUTE = "a route is missing"  # each is returned: quarantine
    ROW = "rows cannot be sent"  # each key's first row is parked, the others wait behind it


ADDRESSES: dict[Guilt, dict[str, str | None]] = {
    Guilt.QUEUE: {"exchange": "", "routing_key": FULL, "headers": None},
    Guilt.ROUTE: {"exchange": "", "routing_key": NOWHERE, "headers": None},
    Guilt.ROW: {"exchange": None, "routing_key": None, "headers": UNSENDABLE},
}


def measure(  # noqa: PLR0913  (each is an option of the command)
    *,
    rounds: CountOrNone = 3,
    innocent_rounds: CountOrNone = 3,
    seconds: Positive = 20.0,
    rate: Positive = 500.0,
    idle_seconds: PositiveOrNone = 30.0,
    writer_rounds: CountOrNone = 5,
    writer_seconds: Positive = 8.0,
    ordering: Ordering = Ordering.KEY,
    storage: WhichStorage = WhichStorage.PENDING,
    run: Bench,
) -> None:
    """Measure commit to confirm, the idle relay and writers. Exit code 1 when a message was lost.

    Parameters
    ----------
    rounds
        Rounds of the steady load; 0 leaves it out.
    innocent_rounds
        Rounds of that load next to rows that cannot be delivered, of each kind; 0 leaves them out.
    seconds
        How long each of them lasts.
    rate
        Rows a second, from eight writers together.
    idle_seconds
        How long the idle relay is watched; 0 leaves it out.
    writer_rounds
        Rounds with the trigger and without; 0 leaves them out.
    writer_seconds
        How long each half of them lasts.
    ordering
        The relay's setting.
    storage
        Where the rows lie: among the pending ones, in the log, or by turns in both, each with its relay.
    """
    late = Column("out of order, %", "out_of_order", 0, Shown.MEDIAN)  # visible after a higher id
    waits = run.table("Commit to confirm, ms", *(Column(name, name, 2) for name in QUANTILES), late, *COST)
    p99, ratio = Column("p99", "p99", 2), Column("ratio", "p99", 2, is_ratio=True)
    innocents = run.table("Keys of which nothing is refused, ms", p99, ratio)
    names = {"relay and PostgreSQL": "sum", "relay": "relay", "PostgreSQL": "postgres", "RabbitMQ": "rabbitmq"}
    idle = run.table("Nothing to do: percent of one core", *(Column(title, name, 2) for title, name in names.items()))
    commits = Column("commits/s", "rate"), Column("ratio", "rate", 3, is_ratio=True)
    writers = run.table(f"{WRITERS} writers flat out", *commits)
    with (
        private_servers(run, routing_key=table.ROUTING_KEY) as servers,
        stored(servers, storage) as databases,
    ):
        with ExitStack() as stack:
            relays = {
                where: stack.enter_context(watched_relay(database, ordering, node=where))
                for where, database in databases.items()
            }
            with run.status("warming up"):
                for watched in relays.values():
                    measure_waits(watched, rate, WARM_UP)
            for number, where in run.turns([*relays], rounds):
                for name, figures in measure_waits(relays[Storage(where)], rate, seconds).items():
                    waits.add(f"{where}, {name}", figures, number)
            for guilt, (where, watched) in product(Guilt, relays.items()):
                sides = {
                    f"{where}, alone, before {guilt}": partial(measure_innocents, watched, rate, seconds, None),
                    f"{where}, while {guilt}": partial(measure_innocents, watched, rate, seconds, guilt),
                }
                innocents.measure(sides, innocent_rounds)
            writers.measure(_writer_sides(relays, writer_seconds), writer_rounds)
        if idle_seconds:
            for where, database in databases.items():
                with watched_relay(database, ordering) as watched:
                    idle.measure({f"{where}, {idle_seconds:g} s": partial(measure_idle, watched, idle_seconds)}, 1)


def _writer_sides(relays: Mapping[Storage, WatchedRelay], seconds: float) -> dict[str, Callable[[], Figures]]:
    return {
        f"{where}, {'with' if has_trigger else 'without'} the trigger": partial(
            measure_writers, watched, seconds, has_trigger=has_trigger
        )
        for (where, watched), has_trigger in product(relays.items(), (False, True))
    }


def measure_waits(
    watched: WatchedRelay, rate: float, seconds: float, guilt: Guilt | None = None
) -> Mapping[str, Figures]:
    """Write steadily, and compare each commit with its row's confirm, as the relay noted it, and with `sent_at`.

    `sent_at` is the begin of the transaction that marks the row. All are readings of one machine's clock.
    """
    servers = watched.servers
    clear(servers, same_ids=False)
    meter, wal = servers.cpu(sender=[watched.relay.pid]), value(watched.watch, WAL)
    with guilty_rows(*servers.urls, guilt) if guilt else nullcontext():
        commits = write_steadily(watched.writers, servers.database_url, rate, seconds)
    wait_drained(watched.watch, watched.relay)
    cost = {**meter.micros(len(commits)), "wal_bytes": (value(watched.watch, WAL) - wal) / len(commits)}
    sent_at: dict[int, float] = dict(watched.watch.execute(SENT).fetchall())
    confirmed_at = watched.confirmed_at()
    sent = [commit for commit in commits if commit.id in sent_at and commit.id in confirmed_at]
    lost = len(commits) - min(len(sent), queue.depth(servers.broker_url))
    counts = {"written": len(commits), "lost": lost, "out_of_order": 100 * _share_out_of_order(commits)}
    return {
        FROM_ANSWER: {**_quantiles([confirmed_at[one.id] - one.returned_at for one in sent]), **counts, **cost},
        "from COMMIT's request": _quantiles([confirmed_at[one.id] - one.asked_at for one in sent]),
        "from COMMIT's answer to the mark": _quantiles([sent_at[one.id] - one.returned_at for one in sent]),
    }


def measure_innocents(watched: WatchedRelay, rate: float, seconds: float, guilt: Guilt | None) -> Figures:
    """Write steadily, alone or next to rows that cannot be delivered."""
    return measure_waits(watched, rate, seconds, guilt)[FROM_ANSWER]


def measure_idle(watched: WatchedRelay, seconds: float) -> Figures:
    """Look at the CPU time that everything uses while nobody writes."""
    watched.servers.rest(watched.relay.pid)
    meter = watched.servers.cpu(relay=[watched.relay.pid])
    time.sleep(seconds)
    percents = meter.percents()
    return {**percents, "sum": percents["relay"] + percents["postgres"]}


def measure_writers(watched: WatchedRelay, seconds: float, *, has_trigger: bool) -> Figures:
    """Let the writers go as fast as they can."""
    clear(watched.servers, same_ids=False)
    if not has_trigger:
        watched.watch.execute(DISABLE)
    watched.watch.execute("CHECKPOINT")
    watched.servers.rest(watched.relay.pid)
    rate = write_flat_out(watched.writers, watched.servers.database_url, seconds)
    wait_drained(watched.watch, watched.relay)
    watched.watch.execute(ENABLE)
    return {"rate": rate}


@contextmanager
def guilty_rows(database_url: str, broker_url: str, guilt: Guilt) -> Iterator[None]:
    """Write rows that cannot be delivered within the block, from its beginning to its end, and remove them then."""
    if guilt is Guilt.QUEUE:
        queue.declare_full(broker_url, FULL)
    values = {"event_type": EVENT_TYPE, "keys": KEYS, **ADDRESSES[guilt]}
    done = threading.Event()
    with psycopg.connect(database_url, autocommit=True) as connection:

        def write() -> None:
            while not done.wait(INTERVAL):
                connection.execute(WRITE, values)

        writer = threading.Thread(target=write, name="guilty")
        writer.start()
        try:
            yield
        finally:
            done.set()
            writer.join()
            _forget(connection)


def _forget(connection: psycopg.Connection) -> None:
    """Remove them, also while the relay moves them from partition to partition."""
    while True:
        try:
            connection.execute(FORGET)
        except psycopg.errors.SerializationFailure:
            continue
        return


def _quantiles(waits: list[float]) -> dict[str, float]:
    """Return them in milliseconds."""
    ascending = sorted(waits)
    return {name: 1000 * quantile(ascending, share) for name, share in QUANTILES.items()}


def _share_out_of_order(commits: list[Commit]) -> float:
    highest = behind = 0
    for commit in commits:
        behind += commit.id < highest
        highest = max(highest, commit.id)
    return behind / len(commits)


if __name__ == "__main__":
    main(measure)
