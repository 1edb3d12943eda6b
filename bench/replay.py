"""How fast a replay goes, and what it costs live traffic: `python -m bench.replay`. See docs/benchmarks.md.

Three measurements:

- the rate of a replay next to that of a drain of the same rows;
- commit to confirm of live traffic, with a replay at the same time and without;
- the memory of a replay of a million rows.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Backlog, Keys
from bench.frame.drains import clear, drain_backlog
from bench.frame.error import BenchmarkError
from bench.frame.processes import peak_bytes
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, Count, CountOrNone, Figures, Positive, PositiveOrNone, Shown, main, quantile
from bench.frame.servers import Servers, private_servers
from bench.frame.watch import value, wait_drained, watching
from bench.frame.watched_relay import WatchedRelay, watched_relay
from bench.frame.writers import write_steadily
from relay.testing.servers.process import Process, wait_for

WARM_UP = 3.0  # seconds of live traffic that do not count
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
REPLAYED = "SELECT done FROM outbox.job WHERE kind = 'replay' ORDER BY id DESC LIMIT 1"


def measure(
    *,
    rounds: CountOrNone = 3,
    rows: Count = 200_000,
    live_rounds: CountOrNone = 3,
    live_rate: Positive = 1000.0,
    live_seconds: Positive = 30.0,
    replay_rate: PositiveOrNone = 0.0,
    memory_rows: CountOrNone = 1_000_000,
    run: Bench,
) -> None:
    """Measure replays: rate, live traffic during one, memory. Exit code 1 when a message was lost.

    Parameters
    ----------
    rounds
        Rounds of a drain and a replay; 0 leaves them out.
    rows
        Rows that are drained and replayed.
    live_rounds
        Rounds of live traffic, each without a replay and with one; 0 leaves them out.
    live_rate
        Rows a second of the live traffic.
    live_seconds
        How long it lasts, each time.
    replay_rate
        What the replay during it is told by `--rate`; 0: nothing, so that it finds its own pace.
    memory_rows
        Rows of the replay whose memory is measured; 0 leaves it out.
    """
    rates = run.table(
        "A replay next to a drain of the same rows",
        Column("rows/s", "rate"),
        Column("ratio", "rate", 2, is_ratio=True),
        Column("PostgreSQL's CPU, us a row", "postgres_cpu", 1),
    )
    live = run.table(
        "Live traffic, commit to confirm, ms",
        *(Column(name, name, 2) for name in ("p50", "p99")),
        *(Column(f"{name}, ratio", name, 2, is_ratio=True) for name in ("p50", "p99")),
        Column("rows written/s", "rate", 0, Shown.MEDIAN),
        Column("replayed meanwhile", "replayed", 0, Shown.MEDIAN),
    )
    memory = run.table("The most memory that a replay held, MiB", Column("MiB", "peak"))
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        if rounds:
            with run.status("drawing the rows"):
                backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows)
            for number, _ in run.turns(["a drain, then a replay"], rounds):
                for name, figures in zip(("drain", "replay"), measure_rates(servers, backlog), strict=True):
                    rates.add(name, figures, number, reference="drain")
        if live_rounds:
            with watched_relay(servers) as watched:
                with run.status("warming up"):
                    write_steadily(watched.writers, servers.database_url, live_rate, WARM_UP)
                beside = partial(measure_beside, watched, live_rate, live_seconds, rows=rows, replay_rate=replay_rate)
                sides = {"alone": partial(beside, is_beside=False), "beside a replay": partial(beside, is_beside=True)}
                live.measure(sides, live_rounds)
        if memory_rows:
            memory.measure({f"{memory_rows:,} rows": partial(measure_memory, servers, memory_rows)}, 1)


def measure_rates(servers: Servers, backlog: Backlog) -> tuple[Figures, Figures]:
    """Drain a backlog, then replay it, each on servers that have come to rest.

    The drain is measured as bench/drain.py does. The replay's interval is the life of its process: the start of Python,
    the list of the rows and the last confirm lie in it.
    """
    drained = drain_backlog(servers, backlog, BenchRelay(*servers.urls, servers.folder))
    queue.purge(servers.broker_url)
    with watching(servers.database_url) as watch:
        watch.execute("CHECKPOINT")
    servers.rest()
    meter, started = servers.cpu(), time.monotonic()
    with running_replay(servers) as replaying:
        wait_ended(replaying)
    rate, cpu = backlog.rows / (time.monotonic() - started), meter.micros(backlog.rows)
    return drained, {"rate": rate, **cpu, "lost": max(0, backlog.rows - queue.depth(servers.broker_url))}


def measure_beside(
    watched: WatchedRelay, rate: float, seconds: float, *, rows: int, is_beside: bool, replay_rate: float = 0.0
) -> Figures:
    """Write steadily to a table with `rows` sent ones; with `is_beside`, while a replay sends these again.

    The replay starts with the writers, so its start and its list count; it is stopped with them.
    """
    servers, watch = watched.servers, watched.watch
    clear(servers, same_ids=False)
    watch.execute(FILL, [rows])
    watch.execute("CHECKPOINT")
    servers.rest(watched.relay.pid)
    replayed = 0
    if is_beside:
        with running_replay(servers, replay_rate) as replaying:
            commits = write_steadily(watched.writers, servers.database_url, rate, seconds, hold=HOLD)
            wait_for(lambda: not replaying.is_running() or has_begun(servers), "the replay begins", TOO_LONG)
        # The third: the signal met a process that had done its job, and was about to exit.
        _require(replaying, 0, 130, -signal.SIGTERM)
        replayed = value(watch, REPLAYED)
    else:
        commits = write_steadily(watched.writers, servers.database_url, rate, seconds, hold=HOLD)
    wait_drained(watch, watched.relay)
    waits = watched.waits(commits)
    missing = len(commits) + replayed - queue.depth(servers.broker_url)
    return {
        "p50": quantile(waits, 0.5),
        "p99": quantile(waits, 0.99),
        "rate": len(commits) / (commits[-1].returned_at - commits[0].returned_at),
        "confirmed": len(waits),
        "replayed": replayed,
        "lost": max(0, missing, len(commits) - len(waits)),
    }


def measure_memory(servers: Servers, rows: int) -> Figures:
    """Replay so many rows of half a KiB, and return the most memory that the process had at one time, in MiB."""
    clear(servers, same_ids=True)
    with watching(servers.database_url) as watch:
        watch.execute(FILL, [rows])
    with running_replay(servers) as replaying:
        return {"peak": wait_ended(replaying) / (1 << 20)}


@contextmanager
def running_replay(servers: Servers, rate: float = 0.0) -> Iterator[Process]:
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
    """Whether the replay has listed its rows; before, SIGTERM may meet a Python that is still starting."""
    return "replay.listed" in (servers.folder / REPLAY_LOG).read_text()


def wait_ended(replaying: Process) -> int:
    """Wait until it has done its job; return the most memory that it had at one time, in bytes.

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


def _require(replaying: Process, *codes: int) -> None:
    if replaying.returncode not in codes:
        raise BenchmarkError(f"the replay ended with code {replaying.returncode}:\n{replaying.log_end()}")


if __name__ == "__main__":
    main(measure)
