"""One case of bench/consume in one round: a consumer on a full queue."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench.frame import queue, reference
from bench.frame.backlog import Backlog
from bench.frame.error import BenchmarkError
from bench.frame.processes import cpu_seconds, wait_idle
from bench.frame.servers import Servers
from bench.frame.watch import watching
from bench.programs.consumers import BROKER_URL, CONCURRENCY, DATABASE_URL, Kind
from tests.support.process import Process

POLL = 0.1  # seconds
TOO_LONG = 600.0  # seconds

MAKE_PROJECTION = "CREATE TABLE IF NOT EXISTS projection (message_id uuid PRIMARY KEY, customer text, bytes integer)"
EMPTY = "TRUNCATE projection, outbox.processed_message"
# By the begin of the first and of the last transaction, as the server has them: the same for all programs.
DONE = """
    SELECT count(*), extract(epoch FROM max(processed_at) - min(processed_at))::float8 FROM outbox.processed_message
"""
EFFECTS = "SELECT count(*) FROM projection"


@dataclass(frozen=True, slots=True)
class Consumed:
    """One case in one round; CPU in microseconds a message."""

    kind: Kind
    round: int
    messages: int
    seconds: float
    consumer_cpu: float
    postgres_cpu: float
    rabbitmq_cpu: float

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


def measure(servers: Servers, kind: Kind, number: int, backlog: Backlog, program: Path) -> Consumed:
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
        wait_idle(servers.postgres_pid, servers.rabbitmq_pid)
        pids = servers.postgres_pid, servers.rabbitmq_pid
        before = [cpu_seconds(pid) for pid in pids]
        consumer = _start(servers, kind)
        try:
            seconds = _wait_done(watch, consumer, backlog.rows)
            used = [cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
            own = cpu_seconds(consumer.pid)
        finally:
            consumer.stop(signal.SIGTERM)
        (effects,) = watch.execute(EFFECTS).fetchone() or (0,)
    left = queue.depth(servers.broker_url)
    if effects != backlog.rows or left > CONCURRENCY:
        raise BenchmarkError(f"{kind}: {effects} effects of {backlog.rows} messages, {left} left in the queue")
    micro = 1e6 / backlog.rows
    return Consumed(kind, number, backlog.rows, seconds, own * micro, used[0] * micro, used[1] * micro)


def _start(servers: Servers, kind: Kind) -> Process:
    urls = {DATABASE_URL: servers.database_url, BROKER_URL: servers.broker_url}
    command = [sys.executable, "-m", "bench.programs.consumers", kind]
    return Process(command, log=servers.folder / "consumer.log", environment={**os.environ, **urls}, name="consumer")


def _wait_done(watch: psycopg.Connection, consumer: Process, messages: int) -> float:
    """Give the seconds from the first transaction to the last."""
    deadline = time.monotonic() + TOO_LONG
    while time.monotonic() < deadline and consumer.is_running():
        done, seconds = watch.execute(DONE).fetchone() or (0, None)
        if done >= messages:
            return float(seconds)
        time.sleep(POLL)
    raise BenchmarkError(f"the consumer has not taken {messages} messages within {TOO_LONG:g} s, or has ended")
