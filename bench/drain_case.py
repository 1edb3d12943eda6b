"""One case of bench/drain in one round: the relay on a backlog, or the C client with the same messages."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psycopg

from bench.frame import backlog as table
from bench.frame import queue, reference
from bench.frame.backlog import Backlog
from bench.frame.processes import cpu_seconds, wait_idle
from bench.frame.relay_process import running_relay
from bench.frame.servers import Servers
from bench.frame.watch import wait_drained, watching
from relay.config.settings import Ordering
from tests.support.process import Process

REFERENCE = "C client"


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: the relay with an ordering, or without one the C client."""

    backlog: Backlog
    ordering: Ordering | None

    @property
    def name(self) -> str:
        return REFERENCE if self.ordering is None else f"{self.ordering}, {self.backlog.keys} keys"


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds of CPU time."""

    sender: float
    postgres: float
    rabbitmq: float

    def since(self, before: "Cpu") -> "Cpu":
        return Cpu(self.sender - before.sender, self.postgres - before.postgres, self.rabbitmq - before.rabbitmq)


@dataclass(frozen=True, slots=True)
class Measured:
    """One case in one round; CPU in microseconds a message."""

    case: str
    round: int
    messages: int
    seconds: float
    sender_cpu: float  # the relay, or the C client
    postgres_cpu: float
    rabbitmq_cpu: float
    in_queue: int

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def lost(self) -> int:
        return max(0, self.messages - self.in_queue)

    @classmethod
    def now(cls, servers: Servers, case: str, number: int, *, messages: int, seconds: float, cpu: Cpu) -> Self:
        """Put together what was measured just now; the queue still holds the messages."""
        micro = 1e6 / messages
        return cls(
            case=case,
            round=number,
            messages=messages,
            seconds=seconds,
            sender_cpu=cpu.sender * micro,
            postgres_cpu=cpu.postgres * micro,
            rabbitmq_cpu=cpu.rabbitmq * micro,
            in_queue=queue.depth(servers.broker_url),
        )


def measure(servers: Servers, case: Case, number: int, *, program: Path | None, profile: Path | None) -> Measured:
    """Measure one case once: on an empty queue, an empty table, and servers that have come to rest."""
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=True)
    if case.ordering is None:
        assert program is not None, "the C client is built before it is measured"
        seconds, cpu = _publish_by_client(servers, case.backlog, program)
    else:
        seconds, cpu = _drain_by_relay(servers, case.backlog, case.ordering, profile)
    return Measured.now(servers, case.name, number, messages=case.backlog.rows, seconds=seconds, cpu=cpu)


def drain(
    servers: Servers,
    watch: psycopg.Connection,
    relay: Process,
    writing: AbstractContextManager[psycopg.Connection],
    *,
    others: Sequence[Process] = (),
    look: Callable[[], None] = lambda: None,
) -> tuple[float, Cpu]:
    """Let a relay that is idle, and others, drain what `writing` has written and not yet committed; give its seconds.

    `look` is called all the time meanwhile, and once just before.
    """
    with writing as writer:
        watch.execute("CHECKPOINT")  # what the filling left to write is not the relay's
        wait_idle(servers.postgres_pid, servers.rabbitmq_pid)
        look()

        before = _cpu(servers, relay, *others)
        started = time.monotonic()
        writer.commit()
        ended = wait_drained(watch, relay, look=look)
        return ended - started, _cpu(servers, relay, *others).since(before)


def _publish_by_client(servers: Servers, backlog: Backlog, program: Path) -> tuple[float, Cpu]:
    wait_idle(servers.postgres_pid, servers.rabbitmq_pid)
    before = cpu_seconds(servers.rabbitmq_pid)
    published = reference.publish(program, servers.broker_url, backlog)
    rabbitmq = cpu_seconds(servers.rabbitmq_pid) - before
    return published.seconds, Cpu(published.cpu_seconds, 0.0, rabbitmq)


def _drain_by_relay(servers: Servers, backlog: Backlog, ordering: Ordering, profile: Path | None) -> tuple[float, Cpu]:
    log = servers.folder / "relay.log"
    with (
        watching(servers.database_url) as watch,
        running_relay(servers.database_url, servers.broker_url, ordering, log=log, profile=profile) as relay,
    ):
        return drain(servers, watch, relay, table.uncommitted(servers.database_url, backlog))


def _cpu(servers: Servers, *relays: Process) -> Cpu:
    sender = sum(cpu_seconds(relay.pid) for relay in relays)
    return Cpu(sender, cpu_seconds(servers.postgres_pid), cpu_seconds(servers.rabbitmq_pid))
