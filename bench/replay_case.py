"""What bench/replay measures: the rate of a replay next to a drain, live traffic beside one, and its memory."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Backlog
from bench.frame.error import BenchmarkError
from bench.frame.processes import cpu_seconds, peak_bytes, wait_idle
from bench.frame.relay_process import running_relay
from bench.frame.servers import Servers
from bench.frame.watch import wait_drained, watching
from bench.frame.writers import write_steadily, writer_pool
from bench.programs.confirms import read_confirms
from relay.config.settings import Ordering
from tests.support.process import Process, wait_for

POLL = 0.02  # seconds
REPLAY_LOG = "replay.log"
TOO_LONG = 900.0  # seconds
HOLD = (0.0, 0.004)  # seconds that a writer's transaction stays open: short, so that eight reach 1,000 a second

# Sent long before the live rows, and of the same size.
FILL = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT 'invoice', (n %% 20000)::text, 'InvoiceIssued', json_build_object('n', n, 'note', repeat('n', 480)),
        'sent', now()
    FROM generate_series(1, %s) AS n
"""
REPLAYED = "SELECT replayed FROM outbox.replay ORDER BY id DESC LIMIT 1"


@dataclass(frozen=True, slots=True)
class Rates:
    """One round: rows a second; CPU of PostgreSQL in microseconds a row."""

    drain: float
    replay: float
    drain_postgres: float
    replay_postgres: float
    lost: int


@dataclass(frozen=True, slots=True)
class Live:
    """Live traffic: its relay and its writers, and the connection that looks."""

    servers: Servers
    relay: Process
    confirms: Path  # where the relay notes them
    watch: psycopg.Connection
    writers: ProcessPoolExecutor


@dataclass(frozen=True, slots=True)
class Beside:
    """One round of live traffic: milliseconds from COMMIT's answer to the confirm, sorted."""

    latencies: list[float]
    rate: float  # rows a second that the writers really wrote
    replayed: int  # meanwhile
    lost: int


def measure_rates(servers: Servers, backlog: Backlog) -> Rates:
    """Drain a backlog, then replay it, each on servers that have come to rest.

    The drain is measured as bench/drain does. The replay's interval is the life of its process: the start of Python,
    the list of the rows and the last confirm lie in it.
    """
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=True)
    log = servers.folder / "relay.log"
    with watching(servers.database_url) as watch:
        with (
            running_relay(servers.database_url, servers.broker_url, Ordering.KEY, log=log) as relay,
            table.uncommitted(servers.database_url, backlog) as writer,
        ):
            used, started = _at_rest(watch, servers)
            writer.commit()
            wait_drained(watch, relay)
            drain, drain_postgres = time.monotonic() - started, cpu_seconds(servers.postgres_pid) - used
        lost = backlog.rows - queue.depth(servers.broker_url)
        queue.purge(servers.broker_url)
        used, started = _at_rest(watch, servers)
        with running_replay(servers) as replaying:
            wait_ended(replaying)
        replay, replay_postgres = time.monotonic() - started, cpu_seconds(servers.postgres_pid) - used
    lost += backlog.rows - queue.depth(servers.broker_url)
    rows, micro = backlog.rows, 1e6 / backlog.rows
    return Rates(rows / drain, rows / replay, drain_postgres * micro, replay_postgres * micro, max(0, lost))


def measure_beside(
    live: Live, rate: float, seconds: float, *, rows: int, is_beside: bool, replay_rate: float | None = None
) -> Beside:
    """Write steadily to a table with `rows` sent ones; with `is_beside`, while a replay sends these again.

    The replay starts with the writers, so its start and its list count; it is stopped with them.
    """
    servers, watch = live.servers, live.watch
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=False)
    watch.execute(FILL, [rows])
    watch.execute("CHECKPOINT")
    wait_idle(live.relay.pid, servers.postgres_pid, servers.rabbitmq_pid)
    replayed = 0
    if is_beside:
        with running_replay(servers, replay_rate) as replaying:
            commits = write_steadily(live.writers, servers.database_url, rate, seconds, HOLD)
            wait_for(lambda: not replaying.is_running() or has_begun(servers), "the replay begins", TOO_LONG)
        # The third: the signal met a process that had done its job, and was about to exit.
        _require(replaying, 0, 130, -signal.SIGTERM)
        replayed = _value(watch, REPLAYED)
    else:
        commits = write_steadily(live.writers, servers.database_url, rate, seconds, HOLD)
    wait_drained(watch, live.relay)
    confirmed_at = read_confirms(live.confirms)
    confirmed = [commit for commit in commits if commit.id in confirmed_at]
    latencies = sorted(1000 * (confirmed_at[commit.id] - commit.returned_at) for commit in confirmed)
    missing = len(commits) + replayed - queue.depth(servers.broker_url)
    written = len(commits) / (commits[-1].returned_at - commits[0].returned_at)
    return Beside(latencies, written, replayed, max(0, missing, len(commits) - len(confirmed)))


def measure_memory(servers: Servers, rows: int) -> float:
    """Replay so many rows of half a KiB, and give the most memory that the process had at one time, in MiB."""
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=True)
    with watching(servers.database_url) as watch:
        watch.execute(FILL, [rows])
    with running_replay(servers) as replaying:
        return wait_ended(replaying) / (1 << 20)


@contextmanager
def running_live(servers: Servers) -> Iterator[Live]:
    """Start the relay and the writers; they end with the block."""
    log, confirms = servers.folder / "relay.log", servers.folder / "confirms"
    with (
        watching(servers.database_url) as watch,
        writer_pool() as writers,
        running_relay(servers.database_url, servers.broker_url, Ordering.KEY, log=log, confirms=confirms) as relay,
    ):
        yield Live(servers, relay, confirms, watch, writers)


@contextmanager
def running_replay(servers: Servers, rate: float | None = None) -> Iterator[Process]:
    """Start `relay replay --all`, and hand it over at once; at the end it is told to stop."""
    log = servers.folder / REPLAY_LOG
    log.write_text("")
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": servers.database_url,
        "RELAY_BROKER_URL": servers.broker_url,
        "RELAY_LOG_FORMAT": "json",
    }
    command = [str(Path(sys.executable).with_name("relay")), "replay", "--all"]
    replaying = Process([*command, *(["--rate", f"{rate:g}"] if rate else [])], log=log, environment=environment)
    try:
        yield replaying
    finally:
        replaying.stop(signal.SIGTERM)


def has_begun(servers: Servers) -> bool:
    """Tell whether the replay has listed its rows; before, SIGTERM may meet a Python that is still starting."""
    return "replay.listed" in (servers.folder / REPLAY_LOG).read_text()


def wait_ended(replaying: Process) -> int:
    """Wait until it has done its job; give the most memory that it had at one time, in bytes.

    Raises:
        BenchmarkError: it failed or takes TOO_LONG; it shows its last words.
    """
    deadline = time.monotonic() + TOO_LONG
    peak = 0
    while replaying.is_running():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the replay takes longer than {TOO_LONG:g} s:\n{replaying.log_end()}")
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
            peak = max(peak, peak_bytes(replaying.pid))
        time.sleep(POLL)
    _require(replaying, 0)
    return peak


def _at_rest(watch: psycopg.Connection, servers: Servers) -> tuple[float, float]:
    """Let the servers come to rest; give PostgreSQL's CPU seconds and the time."""
    watch.execute("CHECKPOINT")
    wait_idle(servers.postgres_pid, servers.rabbitmq_pid)
    return cpu_seconds(servers.postgres_pid), time.monotonic()


def _require(replaying: Process, *codes: int) -> None:
    if replaying.returncode not in codes:
        raise BenchmarkError(f"the replay ended with code {replaying.returncode}:\n{replaying.log_end()}")


def _value(connection: psycopg.Connection, query: LiteralString) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None, "each of these queries gives a row"
    return row[0]
