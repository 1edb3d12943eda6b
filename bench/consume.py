"""What the inbox costs a consumer, and what batches save: `python -m bench.consume`. See docs/benchmarks.md."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import psycopg

from bench.frame import backlog as table
from bench.frame import queue, reference
from bench.frame.backlog import Backlog, Keys
from bench.frame.error import BenchmarkError
from bench.frame.processes import cpu_seconds
from bench.frame.run import Bench, Column, Count, Figures, Shown, main
from bench.frame.servers import Servers, private_servers
from bench.frame.watch import value, watching
from bench.programs.consumers import BROKER_URL, CONCURRENCY, DATABASE_URL, ConsumerKind
from relay.testing.servers.process import Process

POLL = 0.1  # seconds
TOO_LONG = 600.0  # seconds

MAKE_PROJECTION = "CREATE TABLE IF NOT EXISTS projection (message_id uuid PRIMARY KEY, customer text, bytes integer)"
EMPTY = "TRUNCATE projection, outbox.processed_message"
# By the begin of the first and of the last transaction, as the server has them: the same for all programs.
DONE = """
    SELECT count(*), extract(epoch FROM max(processed_at) - min(processed_at))::float8 FROM outbox.processed_message
"""
EFFECTS = "SELECT count(*) FROM projection"


def measure(*, rounds: Count = 3, messages: Count = 20_000, run: Bench) -> None:
    """Measure a consumer with inbox next to a bare loop. Exit code 1 when a message was lost or applied twice.

    Parameters
    ----------
    rounds
        How often each side is measured.
    messages
        How many are in the queue.
    """
    applied = run.table(
        "Messages applied once each; CPU in us a message",
        Column("msg/s", "rate"),
        Column("of bare", "rate", 2, is_ratio=True),
        Column("of one", "rate", 2, is_ratio=True, reference=ConsumerKind.SINGLE),
        Column("CPU us: consumer", "consumer_cpu", 0, Shown.MEDIAN),
        Column("PostgreSQL", "postgres_cpu", 0, Shown.MEDIAN),
        Column("RabbitMQ", "rabbitmq_cpu", 0, Shown.MEDIAN),
    )
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        program = reference.build(servers.folder)
        with run.status("drawing the messages"):
            backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, messages)
        applied.measure({kind: partial(_consume, servers, kind, backlog, program) for kind in ConsumerKind}, rounds)


def _consume(servers: Servers, kind: ConsumerKind, backlog: Backlog, program: Path) -> Figures:
    """Let one consumer take all messages of a backlog.

    Raises:
        BenchmarkError: a message was lost or had two effects, or the consumer ended.
    """
    queue.purge(servers.broker_url)
    reference.publish(program, servers.broker_url, backlog)
    with watching(servers.database_url) as watch:
        watch.execute(MAKE_PROJECTION)
        watch.execute(EMPTY)
        watch.execute("CHECKPOINT")
        servers.rest()
        meter, consumer = servers.cpu(), _start(servers, kind)
        try:
            seconds = _wait_done(watch, consumer, backlog.rows)
            own = 1e6 * cpu_seconds(consumer.pid) / backlog.rows  # its start counts too
            cpu = {**meter.micros(backlog.rows), "consumer_cpu": own}
        finally:
            consumer.stop(signal.SIGTERM)
        effects = value(watch, EFFECTS)
    left = queue.depth(servers.broker_url)
    if effects != backlog.rows or left > CONCURRENCY:
        raise BenchmarkError(f"{kind}: {effects} effects of {backlog.rows} messages, {left} left in the queue")
    return {"rate": backlog.rows / seconds, **cpu}


def _start(servers: Servers, kind: ConsumerKind) -> Process:
    urls = {DATABASE_URL: servers.database_url, BROKER_URL: servers.broker_url}
    command = [sys.executable, "-m", "bench.programs.consumers", kind]
    return Process(command, log=servers.folder / "consumer.log", environment={**os.environ, **urls}, name="consumer")


def _wait_done(watch: psycopg.Connection, consumer: Process, messages: int) -> float:
    """Return the seconds from the first transaction to the last."""
    deadline = time.monotonic() + TOO_LONG
    while time.monotonic() < deadline and consumer.is_running():
        done, seconds = watch.execute(DONE).fetchone() or (0, None)
        if done >= messages:
            return float(seconds)
        time.sleep(POLL)
    raise BenchmarkError(f"the consumer has not taken {messages} messages within {TOO_LONG:g} s, or has ended")


if __name__ == "__main__":
    main(measure)
