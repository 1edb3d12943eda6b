"""A lost binding of many routing keys: `python -m bench.routes`. How fast their rows go aside and out, and who waits.

Each row has a routing key that no other row has, and no queue is bound for any of them. They go into quarantine, rest
there while the relay tries one after the other, and leave when a queue is bound for all. Other rows are written
steadily meanwhile. See docs/benchmarks.md.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aio_pika
import psycopg

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import EVENT_TYPE
from bench.frame.drains import clear
from bench.frame.run import Bench, Column, Count, Figures, Positive, Shown, main, quantile
from bench.frame.servers import private_servers
from bench.frame.watch import value, wait_drained, wait_until
from bench.frame.watched_relay import WatchedRelay, watched_relay
from bench.frame.writers import INSERT, PAYLOAD, Commit

LOST = "bench.lost"  # the queue whose binding is lost
WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)
    SELECT 'order', n::text, %(event_type)s, '1', %(exchange)s, 'order.' || n FROM generate_series(1, %(routes)s) AS n
"""
ROUTES = "SELECT count(*) FROM outbox.quarantine"
IS_OVER = "SELECT NOT EXISTS (SELECT FROM outbox.quarantine) AND NOT EXISTS (SELECT FROM outbox.message_quarantined)"


def measure(
    *, rounds: Count = 3, routes: Count = 30_000, rate: Positive = 100.0, seconds: Positive = 10.0, run: Bench
) -> None:
    """Measure the way into quarantine and out of it. Exit code 1 when a message was lost.

    Parameters
    ----------
    rounds
        How often the binding is lost.
    routes
        Rows, each with another routing key.
    rate
        Other rows a second, from one writer.
    seconds
        How long the rows rest in quarantine, and how long the writer writes alone before.
    """
    columns = Column("rows/s", "rate", 0), Column("others: p50, ms", "p50", 1), Column("p99, ms", "p99", 1)
    phases = run.table(
        f"{routes:,} routing keys without a binding", *columns, Column("max, ms", "max", 0, Shown.HIGHEST)
    )
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers, watched_relay(servers) as watched:
        for number, _ in run.turns(["lost binding"], rounds):
            clear(servers, same_ids=False)
            for phase, figures in lose_a_binding(watched, routes, rate, seconds).items():
                phases.add(phase, figures, number)


def lose_a_binding(watched: WatchedRelay, routes: int, rate: float, seconds: float) -> dict[str, Figures]:
    """Let the rows go aside, rest and out again; return the figures of each phase."""
    watch, servers = watched.watch, watched.servers
    figures: dict[str, Figures] = {}
    written = 0

    def phase(name: str, rows: int, work: Callable[[], None]) -> None:
        nonlocal written
        with writing(servers.database_url, rate) as commits:
            began = time.monotonic()
            work()
            took = time.monotonic() - began
        wait_drained(watch, watched.relay)
        waits = watched.waits(commits)
        written += len(commits)
        figures[name] = {
            "rate": rows / took,
            "lost": len(commits) - len(waits),
            **{quantiles: quantile(waits, share) for quantiles, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        }

    def go_aside() -> None:
        watch.execute(WRITE, {"event_type": EVENT_TYPE, "exchange": queue.EXCHANGE, "routes": routes})
        wait_until(lambda: value(watch, ROUTES) == routes, watched.relay)

    def go_out() -> None:
        asyncio.run(bind(servers.broker_url))
        wait_until(lambda: value(watch, IS_OVER), watched.relay)

    phase("alone", 0, lambda: time.sleep(seconds))
    phase("they go aside", routes, go_aside)
    phase("they rest", 0, lambda: time.sleep(seconds))
    phase("they go out", routes, go_out)
    lost = routes + written - queue.depth(servers.broker_url) - queue.depth(servers.broker_url, LOST)
    asyncio.run(unbind(servers.broker_url))
    return figures | {"they go out": {**figures["they go out"], "lost": max(0, lost)}}


@contextmanager
def writing(database_url: str, rate: float) -> Iterator[list[Commit]]:
    """Write rows one after the other until the end of the block."""
    commits: list[Commit] = []
    done = threading.Event()

    def write() -> None:
        with psycopg.connect(database_url) as connection:
            while not done.wait(1 / rate):
                values = (table.AGGREGATE_TYPE, str(len(commits)), EVENT_TYPE, PAYLOAD)
                (id_,) = connection.execute(INSERT, values).fetchone() or (0,)
                asked_at = time.time()
                connection.commit()
                commits.append(Commit(id_, asked_at, time.time()))

    writer = threading.Thread(target=write, name="writer")
    writer.start()
    try:
        yield commits
    finally:
        done.set()
        writer.join()


async def bind(broker_url: str) -> None:
    """Bind a queue for all of the routing keys."""
    async with await aio_pika.connect(broker_url) as connection, connection.channel() as channel:
        lost = await channel.declare_queue(LOST, durable=True, arguments={"x-queue-type": "quorum"})
        await lost.bind(queue.EXCHANGE, "order.#")


async def unbind(broker_url: str) -> None:
    """Remove the queue."""
    async with await aio_pika.connect(broker_url) as connection, connection.channel() as channel:
        await channel.queue_delete(LOST)


if __name__ == "__main__":
    main(measure)
