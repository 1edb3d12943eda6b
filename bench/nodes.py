"""How long a lane is not delivered when a relay goes: `python -m bench.nodes`. See docs/benchmarks.md.

A row goes into each lane every ten milliseconds. One of two nodes is killed, frozen, stopped in order or started.
Measured is the longest time between two confirms of a lane that changes hands, and the same while nothing happened.
Then the rate of two nodes next to that of one; and what ten idle ones cost.
"""

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise

import psycopg

from bench.frame import backlog as table
from bench.frame.backlog import Backlog, Keys
from bench.frame.drains import CPU, RATE, clear, drain
from bench.frame.error import BenchmarkError
from bench.frame.notes import Note, NoteReader
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, Count, CountOrNone, Figures, Positive, main
from bench.frame.servers import Servers, private_servers
from bench.frame.watch import value, watching
from relay.engine.session.session import LANES
from relay.testing.servers.process import Process

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
UNSENT = "SELECT count(*) FROM outbox.message WHERE state <> 'sent'"


class NodeChange(StrEnum):
    """What becomes of one of two nodes."""

    KILLED = "node killed"
    FROZEN = "node frozen"
    STOPPED = "node stopped in order"
    STARTED = "node started"


WATCHED = {NodeChange.KILLED: 4.0, NodeChange.FROZEN: 15.0, NodeChange.STOPPED: 2.0, NodeChange.STARTED: 3.0}  # seconds
STRIKES = {NodeChange.KILLED: signal.SIGKILL, NodeChange.FROZEN: signal.SIGSTOP, NodeChange.STOPPED: signal.SIGTERM}


def measure(
    *,
    killed: CountOrNone = 20,
    frozen: CountOrNone = 3,
    stopped: CountOrNone = 10,
    started: CountOrNone = 10,
    drains: CountOrNone = 3,
    rows: Count = 200_000,
    idle: CountOrNone = 10,
    idle_seconds: Positive = 20.0,
    run: Bench,
) -> None:
    """Measure what happens when relays come and go. Exit code 1 when a message was lost.

    Parameters
    ----------
    killed, frozen, stopped, started
        How often one of two nodes is killed, frozen, stopped in order or started; 0 leaves it out.
    drains
        How often one node and two drain a backlog in turn.
    rows
        Rows of the backlog.
    idle
        How many nodes are idle together.
    idle_seconds
        How long they are watched.
    """
    rounds = {
        NodeChange.KILLED: killed,
        NodeChange.FROZEN: frozen,
        NodeChange.STOPPED: stopped,
        NodeChange.STARTED: started,
    }
    gaps = run.table(
        "Longest time without a confirm on a lane that changes hands, s",
        Column("gap", "gap", 3),
        Column("before", "before", 3),
    )
    drained = run.table(
        "Backlog drained by one node and by two; CPU in us a message",
        RATE,
        Column("ratio", "rate", 2, is_ratio=True),
        *CPU,
    )
    resting = run.table(
        "Idle nodes: percent of one core",
        *(Column(title, name, 2) for title, name in (("sum", "sum"), ("relays", "relays"), ("PostgreSQL", "postgres"))),
    )
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        if any(rounds.values()):
            with under_load(servers) as scene:
                for going, times in rounds.items():
                    gaps.measure({going: partial(measure_gap, scene, going)}, times)
        if drains:
            with run.status("drawing the rows"):
                backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows)
            sides = {"one node": partial(measure_drain, servers, backlog, 1)}
            drained.measure({**sides, "two nodes": partial(measure_drain, servers, backlog, 2)}, drains)
        if idle:
            resting.measure({f"{idle} nodes": partial(measure_idle, servers, idle, idle_seconds)}, 1)


@dataclass
class NodesUnderLoad:
    """Two nodes under load; every row of every lane is to come."""

    servers: Servers
    watch: psycopg.Connection
    confirms: list[NoteReader] = field(default_factory=list)
    seen: list[Note] = field(default_factory=list)
    started: int = 0

    def start(self) -> Process:
        """Start another node."""
        self.started += 1
        relay = BenchRelay(*self.servers.urls, self.servers.folder, node=f"node-{self.started}", is_noted=True)
        self.confirms.append(relay.confirms)
        return relay.start()

    def await_shares(self, *shares: int) -> dict[str, list[int]]:
        """Wait until the nodes hold so many lanes; return who holds which."""
        deadline = time.monotonic() + SHARED_WITHIN
        while time.monotonic() < deadline:
            held: dict[str, list[int]] = dict(self.watch.execute(HELD).fetchall())
            if sorted(map(len, filter(None, held.values()))) == sorted(shares):
                return held
            time.sleep(0.05)
        raise BenchmarkError(f"the nodes do not share the lanes as {shares} within {SHARED_WITHIN:g} s")

    def gap(self, lanes: Sequence[int], since: float, until: float) -> float:
        """Return the longest time between two confirms of one of the lanes."""
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
def under_load(servers: Servers) -> Iterator[NodesUnderLoad]:
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

        scene = NodesUnderLoad(servers, watch)
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
        if left := value(watch, UNSENT):
            raise BenchmarkError(f"{left} rows were not sent")


def measure_gap(scene: NodesUnderLoad, going: NodeChange) -> Figures:
    """Let one of two nodes come or go, and measure on the lanes that it has or had: seconds."""
    other = scene.start()
    struck_at = time.time()
    lanes = scene.await_shares(LANES // 2, LANES // 2)[f"node-{scene.started}"]
    if going is not NodeChange.STARTED:
        before_from = time.time()
        time.sleep(BEFORE)
        struck_at = before_until = time.time()
        other.tell(STRIKES[going])
    time.sleep(WATCHED[going])
    gap = scene.gap(lanes, struck_at, time.time())
    if going is NodeChange.STARTED:
        before_from = time.time()
        time.sleep(BEFORE)
        before_until = time.time()
    before = scene.gap(lanes, before_from, before_until)
    if going is NodeChange.FROZEN:
        other.tell(signal.SIGCONT)
    other.stop(signal.SIGTERM)
    scene.await_shares(LANES)
    return {"gap": gap, "before": before}


def measure_drain(servers: Servers, backlog: Backlog, nodes: int) -> Figures:
    """Let so many nodes drain a backlog together."""
    clear(servers, same_ids=True)
    with watching(servers.database_url) as watch, _nodes(servers, nodes) as relays:
        return drain(servers, watch, relays, table.uncommitted(servers.database_url, backlog), rows=backlog.rows)


def measure_idle(servers: Servers, nodes: int, seconds: float) -> Figures:
    """Return the percent of a core that idle nodes use, and PostgreSQL with them."""
    table.empty(servers.database_url, same_ids=False)
    with _nodes(servers, nodes) as relays:
        pids = [relay.pid for relay in relays]
        servers.rest(*pids)
        meter = servers.cpu(relays=pids)
        time.sleep(seconds)
        percents = meter.percents()
    return {**percents, "sum": percents["relays"] + percents["postgres"]}


@contextmanager
def _nodes(servers: Servers, number: int) -> Iterator[list[Process]]:
    with ExitStack() as stack:
        relays = [BenchRelay(*servers.urls, servers.folder, node=f"node-{n}") for n in range(number)]
        yield [stack.enter_context(relay.running()) for relay in relays]


if __name__ == "__main__":
    main(measure)
