"""How fast relays drain a backlog, and with how much CPU time: what several benches measure."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg

from bench.frame import backlog as table
from bench.frame import queue, reference
from bench.frame.backlog import Backlog
from bench.frame.relay import BenchRelay
from bench.frame.run import Column, Figures, Shown
from bench.frame.servers import Servers
from bench.frame.watch import WAL, value, wait_drained, watching
from relay.testing.servers.process import Process

RATE = Column("msg/s", "rate")
CPU = (
    Column("CPU us: sender", "sender_cpu", 1, Shown.MEDIAN),
    Column("PostgreSQL", "postgres_cpu", 1, Shown.MEDIAN),
    Column("RabbitMQ", "rabbitmq_cpu", 1, Shown.MEDIAN),
)
COST = (*CPU, Column("WAL, bytes", "wal_bytes", 0, Shown.MEDIAN))


def drain(
    servers: Servers,
    watch: psycopg.Connection,
    relays: Sequence[Process],
    writing: AbstractContextManager[psycopg.Connection],
    *,
    rows: int,
    wait: Callable[..., float] = wait_drained,
    look: Callable[[], None] = lambda: None,
) -> Figures:
    """Let idle relays drain what `writing` has written and not yet committed.

    The interval begins with that commit and ends when no row is pending, which `wait` waits for. `look` is called all
    the time meanwhile, and once just before.
    """
    with writing as writer:
        watch.execute("CHECKPOINT")  # what the filling left to write is not the relay's
        servers.rest()
        look()
        meter = servers.cpu(sender=[relay.pid for relay in relays])
        wal = value(watch, WAL)
        started = time.monotonic()
        writer.commit()
        ended = wait(watch, relays[0], look=look)
        cost = {**meter.micros(rows), "wal_bytes": (value(watch, WAL) - wal) / rows}
    lost = max(0, rows - queue.depth(servers.broker_url))
    return {"rate": rows / (ended - started), **cost, "lost": lost}


def drain_backlog(servers: Servers, backlog: Backlog, relay: BenchRelay) -> Figures:
    """Let one relay drain a backlog; queue and table are empty before."""
    clear(servers, same_ids=True)
    with watching(servers.database_url) as watch, relay.running() as process:
        return drain(servers, watch, [process], table.uncommitted(servers.database_url, backlog), rows=backlog.rows)


def publish_backlog(servers: Servers, backlog: Backlog, program: Path) -> Figures:
    """Let the C client publish a backlog; queue and table are empty before."""
    clear(servers, same_ids=True)
    servers.rest()
    meter = servers.cpu()
    published = reference.publish(program, servers.broker_url, backlog)
    sender = 1e6 * published.cpu_seconds / backlog.rows
    cost = {**meter.micros(backlog.rows), "sender_cpu": sender, "postgres_cpu": 0.0, "wal_bytes": 0.0}
    lost = max(0, backlog.rows - queue.depth(servers.broker_url))
    return {"rate": backlog.rows / published.seconds, **cost, "lost": lost}


def clear(servers: Servers, *, same_ids: bool) -> None:
    """Empty the queue and the table; `same_ids` as `backlog.empty` has it."""
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=same_ids)
