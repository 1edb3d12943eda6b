"""A relay node: both connections, the loop between them, and their loss and return."""

import asyncio
import gc
import signal
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from pydantic import SecretStr

from relay.config.settings import Settings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.loop import forward
from relay.engine.nodes.lanes import Lanes
from relay.engine.nodes.membership import Membership
from relay.engine.nodes.stall import StallWatch
from relay.engine.nodes.vacuum import VacuumWatch
from relay.engine.read.floors import Floors
from relay.engine.read.gate import Gate
from relay.engine.read.tail import History, Tail
from relay.engine.reload import reloading
from relay.engine.send.broker_link import BrokerLink
from relay.engine.send.routes import Router
from relay.engine.send.sender import Sender
from relay.engine.session.database_retry import DatabaseRetry
from relay.engine.session.session import SESSION_LOST, LaneSession
from relay.engine.settle.mark import Delivered, Marker
from relay.engine.settle.parking import Parking
from relay.engine.settle.quarantine import Quarantine
from relay.engine.snapshot import NodeSnapshot
from relay.errors import AccessError, DatabaseUnavailableError, OutboxError, SchemaError, leaves
from relay.logger import get_logger
from relay.retention.rounds import keep_days
from relay.runtime.backoff import Stopping, backoff, unless_stopping, wait_for_event
from relay.runtime.health import Health
from relay.runtime.memory import return_large_blocks
from relay.runtime.stopping import GOODBYE, stopped_by_signals
from relay.servers.postgres.database import Host, kind_of_loss, one_line

log = get_logger(__name__)

RECONNECT_INITIAL, RECONNECT_MAX = 0.1, 3.0  # seconds; ready again within 5 s of the heal
INTERRUPTED = 130  # exit code
OURS_FOR = 0.9  # of node_timeout: without an answer for so long, other nodes may soon end the session
DRAIN_LOOK = 0.2  # seconds: the drain may begin before there is a broker
NO_LANES = "none held"

# What a relay gets when another process downgrades or drops its tables.
TABLES_CHANGED = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
)


async def serve(
    settings: Settings,
    beside: "Callable[[Node], AbstractAsyncContextManager[None]]" = lambda _: nullcontext(),
    reload: Callable[[], Settings] | None = None,
) -> int:
    """Relay until SIGTERM or SIGINT, then drain. A second signal stops at once, and loses nothing.

    Args:
        beside: a context that is open from before the start until after the end, such as an HTTP server.
        reload: reads the settings again at SIGHUP; by default they stay as they were at the start.
    Returns:
        The exit code: 0 after draining, 130 after a second signal.
    Raises:
        OutboxError: it could not start. There was no database or broker within `relay.start_timeout`, or no table.
    """
    # Thousands of rows live for milliseconds each. At its usual pace the collector finds nothing among them, and costs
    # a tenth of the relay's CPU time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return_large_blocks()
    node = Node(settings)
    async with reloading(reload or (lambda: settings), settings, node.use_hosts), beside(node):
        return await _run_until_told(node, settings)


async def _run_until_told(node: "Node", settings: Settings) -> int:
    running = asyncio.create_task(node.run(), name="node")
    is_interrupted = False

    def drain(number: signal.Signals) -> None:
        log.info("relay.draining", signal=number.name)
        node.start_draining()

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        node.unplug()

    try:
        with stopped_by_signals(drain, running, interrupt=interrupt):
            await running
    except asyncio.CancelledError:
        is_interrupted = True
    except BaseExceptionGroup as group:
        error = _first(group)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            raise AccessError(
                f"{error.diag.message_primary}: `relay config roles` prints the grants that the relay needs"
            ) from group
        if isinstance(error, TABLES_CHANGED):
            raise SchemaError(
                f"the tables in schema {settings.database.schema_name!r} were dropped or changed while the relay ran:"
                f" {error.diag.message_primary}; run `relay migrate` of this release, then start the relay again"
            ) from group
        raise error from group
    if is_interrupted:  # a task group whose tasks fail meanwhile forgets that it was cancelled
        log.warning("relay.interrupted")
        return INTERRUPTED
    log.info("relay.stopped")
    return 0


@dataclass(frozen=True, slots=True)
class Parts:
    """What carries rows through one session of the database, from the read to the mark."""

    retry: DatabaseRetry
    tail: Tail
    gate: Gate
    parking: Parking
    quarantine: Quarantine
    marker: Marker
    floors: Floors
    lanes: Lanes
    membership: Membership

    def beside(self, session: LaneSession) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Yield what runs at the same time as the loop until cancelled, each with a name."""
        yield "membership", self.membership.run()
        yield "published", self.membership.keep_clear()
        yield "lanes", self.lanes.run()
        yield "floors", self.floors.keep()
        yield "days", self.retry.keep_days()
        yield "parking", self.parking.door.run()
        yield "quarantine", self.quarantine.door.run()
        yield "discarding", self.marker.discarding.run()
        yield "horizon", VacuumWatch(session).run()

    def forward(self, sender: Sender, drain: asyncio.Event) -> Coroutine[Any, Any, None]:
        """Return the loop."""
        return forward(
            self.tail,
            self.gate,
            sender,
            parking=self.parking,
            quarantine=self.quarantine,
            marker=self.marker,
            drain=drain,
        )


class Node:
    """One node with one set of lanes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._health = Health(settings.relay.stall_after)
        for part in ("database", "broker"):
            self._health.expect(part, "not connected yet")
        self._health.expect("lanes", NO_LANES)
        self._policy = DeliveryPolicy.of(settings.relay.ordering, settings.relay.key_policy)
        self._sender = Sender(self._policy, settings.relay.max_in_flight, Router.of(settings).unroutable)
        self._delivered = Delivered()
        self._broker_link = BrokerLink(
            settings,
            self._sender,
            self._health,
            barring=True,
            topology=settings.topology,
            start_timeout=settings.relay.start_timeout,
        )
        self._session: LaneSession | None = None
        self._stalls = StallWatch(
            self._sender, self._delivered, self._health, settings.relay, session=lambda: self._session
        )
        self._tail: Tail | None = None
        self._history = History(self._health)
        self._losses: dict[str, int] = Counter()  # of database sessions, by reason
        self._sweep_finds = 0  # of earlier sessions' tails
        self._ready = False
        self._former: int | None = None  # the server process of the last session
        self._forwarding: asyncio.Task[None] | None = None
        self.drain = asyncio.Event()

    def is_ready(self) -> bool:
        """Whether the node has had lanes and both connections at the same time."""
        return self._ready

    @property
    def in_flight(self) -> int:
        return self._sender.in_flight

    def snapshot(self) -> NodeSnapshot:
        """Return the node's counters and state at this moment."""
        sender, session = self._sender, self._session
        return NodeSnapshot(
            ready=not self.hindrances(),
            stalled=self._health.is_stalled,
            lanes=len(session.lanes.held) if session else 0,
            in_flight=sender.in_flight,
            published=self._delivered.total,
            failures=dict(sender.failures),
            unroutable=dict(sender.unroutable),
            confirm_times=sender.confirm_times,
            delivery_times=self._delivered.times,
            sweep_finds=self._sweep_finds + (self._tail.sweep_finds if self._tail else 0),
            database_losses=self._losses,
            broker_losses=self._broker_link.reconnects,
            blocked_seconds=self._broker_link.blocked_seconds,
            refused_seconds=self._health.refusals.seconds,
        )

    def hindrances(self) -> dict[str, str]:
        """Return what keeps the node from delivering now, by part; empty when it can deliver."""
        draining = {"relay": "draining: it was told to stop"} if self.drain.is_set() else {}
        return self._health.hindrances | draining

    async def run(self) -> None:
        """Relay until drained."""
        async with asyncio.TaskGroup() as tasks:
            linking = tasks.create_task(self._broker_link.run(), name="link")
            beside = (
                linking,
                tasks.create_task(self._stalls.run(), name="stalls"),
                tasks.create_task(keep_days(self._settings), name="retention"),
                tasks.create_task(self._end_in_time(linking), name="deadline"),
            )
            await self._relay()
            for task in beside:
                task.cancel()

    def start_draining(self) -> None:
        """Stop reading and sending; `run` returns when what is in flight is settled and marked.

        It returns `GOODBYE` after `relay.drain_timeout` at the latest, also when a server does not answer.
        """
        if self.drain.is_set():
            return
        self.drain.set()
        self._sender.stop()
        if self._tail:
            self._tail.wake()

    def unplug(self) -> None:
        """End the database session at once; every statement on it fails."""
        if self._session is not None:
            self._session.unplug()

    async def _end_in_time(self, linking: asyncio.Task[None]) -> None:
        """Bound the whole stop: first what is in flight, then the goodbyes to both servers."""
        await self.drain.wait()
        drain_timeout = self._settings.relay.drain_timeout
        await asyncio.sleep(drain_timeout)
        log.warning("drain.timed_out", in_flight=self.in_flight, seconds=drain_timeout)
        if self._forwarding is not None:
            self._forwarding.cancel()
        linking.cancel()
        await asyncio.sleep(GOODBYE)
        self.unplug()

    async def use_hosts(self, url: SecretStr) -> None:
        """Use the broker's hosts of this URL from now on; see `BrokerLink.use_hosts`."""
        await self._broker_link.use_hosts(url)

    async def _relay(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.relay.start_timeout
        failures = 0
        last: Host | None = None
        while not self.drain.is_set():
            try:
                session = await unless_stopping(
                    self.drain,
                    LaneSession.open(self._settings.database, last=last, key_scope=self._settings.relay.key_scope),
                )
            except Stopping:
                return
            except DatabaseUnavailableError as error:
                if not self._ready and loop.time() >= give_up_at:
                    raise
                waits = {} if self._ready else {"gives_up_in_s": round(give_up_at - loop.time())}
                self._health.degrade("database", str(error), is_refusal=error.is_refusal, **waits)
                failures += 1
                await wait_for_event(self.drain, backoff(failures, RECONNECT_INITIAL, RECONNECT_MAX))
                continue
            opened_at = loop.time()
            last = session.host
            self._health.heal("database")
            try:
                async with session:
                    self._session = session
                    await self._use(session)
            except* SESSION_LOST as group:
                lost = session.ended_by or _first(group)
                self._losses[kind_of_loss(lost)] += 1
                self._health.degrade("database", f"session lost: {one_line(lost)}")
                # After sessions that end as soon as they begin, the waits grow.
                failures = failures + 1 if loop.time() - opened_at < RECONNECT_MAX else 1
            self._session = None
            self._health.expect("lanes", NO_LANES)
            if self.drain.is_set():  # what is in flight has had its time
                return
            with suppress(Stopping):
                await unless_stopping(self.drain, self._sender.abandon())
            await wait_for_event(self.drain, backoff(failures, RECONNECT_INITIAL, RECONNECT_MAX))

    def _parts_of(self, session: LaneSession) -> Parts:
        """Build what carries rows through one session."""
        settings = self._settings.relay
        retry = DatabaseRetry(session, self._health, drain=self.drain)
        tail = Tail(session, settings, self._policy, retry, note_read=self._history.note_read)
        gate = Gate(tail, session.lanes, Router.of(self._settings).address)
        parking = Parking(session, tail, gate.parked, retry)
        quarantine = Quarantine(session, tail, gate, self._sender, policy=self._policy, retry=retry)
        marker = Marker(
            session,
            tail,
            self._sender,
            parking,
            quarantine=quarantine,
            policy=self._policy,
            delivered=self._delivered,
            retry=retry,
            settings=settings,
        )

        async def learn(taken: Collection[int]) -> None:
            if self._policy.put_away_holds_key:
                await parking.load(taken)
            await quarantine.load()

        floors = Floors(session, tail, retry, note_seen=self._history.note_seen)
        lanes = Lanes(session, tail, self._sender, floors=floors, health=self._health, learn=learn)
        membership = Membership(
            session,
            settings,
            lanes,
            sender=self._sender,
            broker_link=self._broker_link,
            health=self._health,
            retry=retry,
            former=self._former,
        )
        return Parts(retry, tail, gate, parking, quarantine, marker, floors, lanes, membership)

    async def _use(self, session: LaneSession) -> None:
        """Relay through one session until drained or until it is lost."""
        parts = self._parts_of(session)
        self._sweep_finds += self._tail.sweep_finds if self._tail else 0
        self._tail, self._former = parts.tail, session.pid
        self._sender.send_while(partial(session.has_answered_within, self._settings.relay.node_timeout * OURS_FOR))
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work, name=name) for name, work in parts.beside(session)]
            while not self._broker_link.up.is_set() and not self.drain.is_set():
                await wait_for_event(self._broker_link.up, DRAIN_LOOK)
            parts.membership.hurry()
            beside.append(tasks.create_task(self._announce(session, parts.lanes), name="announce"))
            # A task, although nothing else happens here: each step of an awaited coroutine passes through all callers.
            forwarding = parts.forward(self._sender, self.drain)
            self._forwarding = tasks.create_task(forwarding, name="forward")
            try:
                await asyncio.wait([self._forwarding])  # until drained, or until `_end_in_time` cancels it
            finally:
                self._forwarding = None
            for task in beside:
                task.cancel()
        await parts.membership.leave()

    async def _announce(self, session: LaneSession, lanes: Lanes) -> None:
        if not self._ready:
            await lanes.held.wait()
            self._ready = True
            log.info("relay.ready", node=self._settings.relay.node, lanes=session.lanes.held)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that the operator should read: an OutboxError if there is one."""
    found = list(leaves(group))
    return next((leaf for leaf in found if isinstance(leaf, OutboxError)), found[0])
