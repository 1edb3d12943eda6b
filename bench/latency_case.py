"""What bench/latency measures: commit to confirm, the idle relay, and writers with and without the wake-up."""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psycopg
from rich.console import Console

from bench.frame import backlog as table
from bench.frame import queue, report
from bench.frame.processes import cpu_seconds, wait_idle
from bench.frame.relay_process import running_relay
from bench.frame.servers import Servers, private_servers
from bench.frame.watch import wait_drained, watching
from bench.frame.writers import Commit, write_flat_out, write_steadily, writer_pool
from bench.guilty import Guilt, guilty_rows
from bench.programs.confirms import read_confirms
from relay.config.settings import Ordering
from tests.support.process import Process

SENT = "SELECT id, extract(epoch FROM sent_at)::float8 FROM outbox.message WHERE state = 'sent'"

SWITCH_TRIGGER = {
    True: "ALTER TABLE outbox.message ENABLE TRIGGER ring",
    False: "ALTER TABLE outbox.message DISABLE TRIGGER ring",
}


@dataclass(frozen=True, slots=True)
class Stand:
    """What a measurement needs at hand: the servers, a running relay, the connection that looks, the writers."""

    servers: Servers
    relay: Process
    watch: psycopg.Connection
    writers: ProcessPoolExecutor
    confirms: Path  # where the relay notes them


@contextmanager
def standing(console: Console, ordering: Ordering = Ordering.KEY) -> Iterator[Stand]:
    """Start all of it, and stop it."""
    with (
        private_servers(console, routing_key=table.ROUTING_KEY) as servers,
        watching(servers.database_url) as watch,
        writer_pool() as pool,
    ):
        confirms = servers.folder / "confirms"
        log = servers.folder / "relay.log"
        with running_relay(servers.database_url, servers.broker_url, ordering, log=log, confirms=confirms) as relay:
            yield Stand(servers, relay, watch, pool, confirms)


@dataclass(frozen=True, slots=True)
class Latencies:
    """One round: milliseconds, sorted; from the COMMIT's answer or its request to the confirm or the mark."""

    from_returned: list[float]  # to the confirm
    from_asked: list[float]  # to the confirm
    to_mark: list[float]  # from the answer
    written: int
    lost: int  # written, and not in the queue or not marked
    out_of_order: float  # share of rows that became visible after a row with a higher id


@dataclass(frozen=True, slots=True)
class Idle:
    """Percent of one core with nothing to do."""

    relay: float
    postgres: float
    rabbitmq: float


@dataclass(frozen=True, slots=True)
class WriterRates:
    """One round: commits a second of all writers."""

    trigger_on: float
    trigger_off: float


@dataclass(frozen=True, slots=True)
class Innocence:
    """One round: the 99th percentile from the COMMIT's answer to the confirm, milliseconds."""

    guilt: Guilt
    alone: float
    beside: float  # while rows of other keys cannot be delivered
    lost: int

    @property
    def ratio(self) -> float:
        return self.beside / self.alone


def measure_innocents(stand: Stand, rate: float, seconds: float, guilt: Guilt) -> Innocence:
    """Write steadily, first alone, then beside rows that cannot be delivered."""
    guilty = guilty_rows(stand.servers.database_url, stand.servers.broker_url, guilt)
    alone, beside = measure_latency(stand, rate, seconds), measure_latency(stand, rate, seconds, beside=guilty)
    usual, now = (report.quantile(one.from_returned, 0.99) for one in (alone, beside))
    return Innocence(guilt, usual, now, alone.lost + beside.lost)


def measure_latency(
    stand: Stand, rate: float, seconds: float, *, beside: AbstractContextManager[None] | None = None
) -> Latencies:
    """Write steadily, and compare each commit with its row's confirm, as the relay noted it, and with `sent_at`.

    `sent_at` is the begin of the transaction that marks the row. All are readings of one machine's clock.
    """
    clear(stand)
    with beside or nullcontext():
        commits = write_steadily(stand.writers, stand.servers.database_url, rate, seconds)
    wait_drained(stand.watch, stand.relay)
    sent_at: dict[int, float] = dict(stand.watch.execute(SENT).fetchall())
    confirmed_at = read_confirms(stand.confirms)
    sent = [commit for commit in commits if commit.id in sent_at and commit.id in confirmed_at]
    return Latencies(
        from_returned=sorted(1000 * (confirmed_at[commit.id] - commit.returned_at) for commit in sent),
        from_asked=sorted(1000 * (confirmed_at[commit.id] - commit.asked_at) for commit in sent),
        to_mark=sorted(1000 * (sent_at[commit.id] - commit.returned_at) for commit in sent),
        written=len(commits),
        lost=len(commits) - min(len(sent), queue.depth(stand.servers.broker_url)),
        out_of_order=_share_out_of_order(commits),
    )


def measure_idle(stand: Stand, seconds: float) -> Idle:
    """Look at the CPU time that everything uses while nobody writes."""
    pids = stand.relay.pid, stand.servers.postgres_pid, stand.servers.rabbitmq_pid
    wait_idle(*pids)
    before = [cpu_seconds(pid) for pid in pids]
    started = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - started
    return Idle(*(100 * (cpu_seconds(pid) - used) / passed for pid, used in zip(pids, before, strict=True)))


def measure_writers(stand: Stand, seconds: float, number: int) -> WriterRates:
    """Let the writers go as fast as they can, once with the trigger and once without; odd rounds begin with it."""
    rates: dict[bool, float] = {}
    for trigger in (True, False) if number % 2 else (False, True):
        clear(stand)
        stand.watch.execute(SWITCH_TRIGGER[trigger])
        stand.watch.execute("CHECKPOINT")
        wait_idle(stand.relay.pid, stand.servers.postgres_pid, stand.servers.rabbitmq_pid)
        rates[trigger] = write_flat_out(stand.writers, stand.servers.database_url, seconds)
        wait_drained(stand.watch, stand.relay)
    stand.watch.execute(SWITCH_TRIGGER[True])
    return WriterRates(trigger_on=rates[True], trigger_off=rates[False])


def clear(stand: Stand) -> None:
    queue.purge(stand.servers.broker_url)
    table.empty(stand.servers.database_url, same_ids=False)


def _share_out_of_order(commits: list[Commit]) -> float:
    highest = behind = 0
    for commit in commits:
        behind += commit.id < highest
        highest = max(highest, commit.id)
    return behind / len(commits)
