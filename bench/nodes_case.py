"""What bench/nodes measures: for how long a lane is not delivered when a node goes, and what several nodes cost."""

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import psycopg

from bench.drain_case import Measured, drain
from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Backlog
from bench.frame.error import BenchmarkError
from bench.frame.notes import Note, NoteReader
from bench.frame.processes import cpu_seconds, wait_idle
from bench.frame.relay_process import running_relay, start_relay
from bench.frame.servers import Servers
from bench.frame.watch import watching
from relay.config.settings import Ordering
from relay.engine.session.session import LANES
from tests.support.process import Process

TICK = 0.01  # seconds between two rows of a lane
BEFORE = 1.0  # seconds of load before a node goes
SHARED_WITHIN = 30.0  # seconds

# A key of each lane.
KEYS = """
    SELECT DISTINCT ON (lane) 'key-' || n
    FROM generate_series(1, 1000) AS n
    CROSS JOIN LATERAL (SELECT hashtextextended(%s || '/key-' || n, 0) & 15 AS lane) AS hashed
    ORDER BY lane
"""
WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT %s, key, %s, '1' FROM unnest(%s::text[]) AS key
"""
HELD = """
    SELECT name, lanes
    FROM outbox.node
    WHERE backend_pid IN (SELECT pid FROM pg_stat_activity) AND heartbeat_at > clock_timestamp() - interval '3 s'
"""


class Going(StrEnum):
    """What becomes of one of two nodes; the value says how long is watched."""

    KILLED = "node killed"
    FROZEN = "node frozen"
    STOPPED = "node stopped in order"
    STARTED = "node started"


WATCHED = {Going.KILLED: 4.0, Going.FROZEN: 15.0, Going.STOPPED: 2.0, Going.STARTED: 3.0}  # seconds
STRIKES = {Going.KILLED: signal.SIGKILL, Going.FROZEN: signal.SIGSTOP, Going.STOPPED: signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Gap:
    """One round; seconds between two confirms of a lane, at most, of the lanes that change hands."""

    going: Going
    round: int
    gap: float
    before: float  # the same while nothing happened


@dataclass
class Scene:
    """Two nodes under load; every row of every lane is to come."""

    servers: Servers
    watch: psycopg.Connection
    confirms: list[NoteReader] = field(default_factory=list)
    seen: list[Note] = field(default_factory=list)
    started: int = 0

    def start(self) -> Process:
        """Start another node."""
        self.started += 1
        name = f"node-{self.started}"
        file = self.servers.folder / f"{name}.confirms"
        self.confirms.append(NoteReader(file))
        urls = self.servers.database_url, self.servers.broker_url
        return start_relay(*urls, Ordering.KEY, log=self.servers.folder / f"{name}.log", confirms=file, node=name)

    def await_shares(self, *shares: int) -> dict[str, list[int]]:
        """Wait until the nodes hold so many lanes; give who holds which."""
        deadline = time.monotonic() + SHARED_WITHIN
        while time.monotonic() < deadline:
            held: dict[str, list[int]] = dict(self.watch.execute(HELD).fetchall())
            if sorted(map(len, filter(None, held.values()))) == sorted(shares):
                return held
            time.sleep(0.05)
        raise BenchmarkError(f"the nodes do not share the lanes as {shares} within {SHARED_WITHIN:g} s")

    def gap(self, lanes: Sequence[int], since: float, until: float) -> float:
        """Give the longest time between two confirms of one of the lanes."""
        for reader in self.confirms:
            self.seen += reader.read()
        lane_of: dict[int, int] = dict(
            self.watch.execute("SELECT id, lane FROM outbox.message WHERE state = 'sent'").fetchall()
        )
        at: defaultdict[int, list[float]] = defaultdict(list)
        for id_, moment in self.seen:
            if since <= moment <= until and id_ in lane_of:
                at[lane_of[id_]].append(moment)
        return max(later - earlier for lane in lanes for earlier, later in pairwise([since, *sorted(at[lane]), until]))


@contextmanager
def under_load(servers: Servers) -> Iterator[Scene]:
    """Write a row to each lane every TICK; start one node, and stop it in the end.

    Raises:
        BenchmarkError: a row was lost.
    """
    ended = threading.Event()
    with watching(servers.database_url) as watch, psycopg.connect(servers.database_url, autocommit=True) as writer:
        keys = [key for (key,) in writer.execute(KEYS, [table.AGGREGATE_TYPE]).fetchall()]

        def write() -> None:
            while not ended.wait(TICK):
                writer.execute(WRITE, [table.AGGREGATE_TYPE, table.EVENT_TYPE, keys])

        scene = Scene(servers, watch)
        node = scene.start()
        scene.await_shares(LANES)
        writing = threading.Thread(target=write)
        writing.start()
        try:
            yield scene
        finally:
            ended.set()
            writing.join()
            time.sleep(1)
            node.stop(signal.SIGTERM)
        (left,) = watch.execute("SELECT count(*) FROM outbox.message WHERE state <> 'sent'").fetchone() or (0,)
        if left:
            raise BenchmarkError(f"{left} rows were not sent")


def measure_gap(scene: Scene, going: Going, number: int) -> Gap:
    """Let one of two nodes come or go, and measure on the lanes that it has or had."""
    other = scene.start()
    if going is Going.STARTED:
        struck_at = time.time()
        lanes = _of_second(scene)
        time.sleep(WATCHED[going])
        gap = scene.gap(lanes, struck_at, time.time())
        before_until = time.time()
        time.sleep(BEFORE)
        before = scene.gap(lanes, before_until, time.time())
        other.stop(signal.SIGTERM)
    else:
        lanes = _of_second(scene)
        began = time.time()
        time.sleep(BEFORE)
        struck_at = time.time()
        other.tell(STRIKES[going])
        time.sleep(WATCHED[going])
        gap, before = scene.gap(lanes, struck_at, time.time()), scene.gap(lanes, began, struck_at)
        if going is Going.FROZEN:
            other.tell(signal.SIGCONT)
        other.stop(signal.SIGTERM)
    scene.await_shares(LANES)
    return Gap(going, number, gap, before)


def _of_second(scene: Scene) -> list[int]:
    return scene.await_shares(LANES // 2, LANES // 2)[f"node-{scene.started}"]


def measure_drain(servers: Servers, backlog: Backlog, nodes: int) -> Measured:
    """Let so many nodes drain a backlog together.

    Raises:
        BenchmarkError: a message was lost.
    """
    queue.purge(servers.broker_url)
    table.empty(servers.database_url, same_ids=True)
    with watching(servers.database_url) as watch, _nodes(servers, nodes) as relays:
        writing = table.uncommitted(servers.database_url, backlog)
        seconds, cpu = drain(servers, watch, relays[0], writing, others=relays[1:])
    measured = Measured.now(servers, f"{nodes} nodes", 0, messages=backlog.rows, seconds=seconds, cpu=cpu)
    if measured.lost:
        raise BenchmarkError(f"{measured.lost} messages were lost")
    return measured


def measure_idle(servers: Servers, nodes: int, seconds: float) -> tuple[float, float]:
    """Give the percent of a core that idle nodes use, and PostgreSQL with them."""
    table.empty(servers.database_url, same_ids=False)
    with _nodes(servers, nodes) as relays:
        pids = [relay.pid for relay in relays]
        wait_idle(servers.postgres_pid, servers.rabbitmq_pid, *pids)
        before = sum(map(cpu_seconds, pids)), cpu_seconds(servers.postgres_pid)
        began = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        after = sum(map(cpu_seconds, pids)), cpu_seconds(servers.postgres_pid)
    return 100 * (after[0] - before[0]) / passed, 100 * (after[1] - before[1]) / passed


@contextmanager
def _nodes(servers: Servers, number: int) -> Iterator[list[Process]]:
    urls = servers.database_url, servers.broker_url
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running_relay(*urls, Ordering.KEY, log=servers.folder / f"idle-{n}.log", node=f"node-{n}")
            )
            for n in range(number)
        ]
