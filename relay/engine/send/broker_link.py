"""Keep a connection to the broker: try one host after another, and open a new channel when the broker closes one."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from math import inf, isinf
from typing import NamedTuple, Protocol

from aiormq.abc import AbstractChannel as Underlay
from aiormq.exceptions import AMQPError, ChannelInvalidStateError, ConnectionClosed
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, Settings
from relay.config.topology import TopologySettings
from relay.engine.row import Outcome, Settled
from relay.engine.send.codec import Encoder
from relay.engine.send.frames import FrameWire
from relay.engine.send.message import MessageIdentity
from relay.engine.send.probe import Prober, RefusedAll
from relay.engine.send.refusals import Refusals
from relay.engine.send.routes import Router
from relay.engine.send.wire import Settle, Wire
from relay.errors import BrokerUnavailableError, PublicReason
from relay.logger import get_logger
from relay.observe import tracing
from relay.observe.histogram import Histogram
from relay.runtime.backoff import backoff, until_tick
from relay.runtime.health import Health
from relay.runtime.hindrance import Hindrance
from relay.servers.rabbitmq import connection as broker
from relay.servers.rabbitmq.connection import (
    HEARTBEATS_UNTIL_GONE,
    BrokerSilentError,
    Connection,
    answer_within,
    close_channel,
    is_told_to_end,
    kind_of_end,
    loss_by,
    words,
)
from relay.servers.rabbitmq.hosts import broker_urls, is_listed
from relay.servers.rabbitmq.topology import Declared, Standing, Thing, declare, default_exchange, failed, listed

log = get_logger(__name__)

LOSSES = (AMQPError, OSError, RuntimeError)  # what the library raises when a channel or connection is lost
WATCH_INTERVAL, IDLE_INTERVAL = 0.25, 1.0  # seconds between two checks of a channel; the second while no row is on it
RECONNECT_INITIAL, RECONNECT_MAX = 0.1, 3.0  # seconds; ready again within 5 s of the heal
LASTED_AFTER = 5.0  # seconds; a connection lost before that, and before any confirm, counts as one more failure
REOPEN_AFTER = 0.02  # seconds; a row that closes each channel must not make a hot loop
# Seconds of refusals after which the relay replaces a channel; each replacement doubles them. A channel that was opened
# while a quorum queue elects its leader keeps asking the old leader. RabbitMQ 3.10 then refuses every message on the
# channel for as long as the old leader's node is down.
RENEW_AFTER, RENEW_AFTER_MAX = 0.1, 30.0
# Seconds in which a host confirms nothing while messages wait, after which the relay tries the next one: from
# `broker.confirm_timeout` on, and doubled each time. A host of RabbitMQ 4.3 that has lost the other nodes does so.
DEAF_AFTER_MAX = 600.0
CONFIRMS = True  # on every channel: only a confirm shows that the broker has taken a message
HINDERED_AFTER = 2.0  # seconds without a connection that works, after which other nodes should take the lanes
ATTEMPTS = 3  # of one declaration, each on a new connection: one that ends each of them must not prevent the start
SETTLED_WITHIN = 1.0  # seconds in which rows in flight may settle on a channel that is given up for refusals


class LinkVerdict(Enum):
    """Why the relay stops using a channel."""

    CLOSED = auto()  # by the broker, or with its connection
    OVERDUE = auto()  # a confirm did not come
    REFUSED = auto()  # a queue takes nothing on this channel
    LEFT = auto()  # its host is no longer configured


class LinkEnded(NamedTuple):
    """How a connection came to its end."""

    was_left: bool  # for other hosts; otherwise it was lost
    reason: Hindrance = Hindrance("")  # of a loss
    is_refusal: bool = False  # the relay has ended it, as the broker refused every message


class RefusesAllError(ConnectionClosed):
    """The broker refuses every message on a connection; only another connection can help.

    Like the library's error, it ends with the broker's words.
    """


class WireFaultError(Exception):
    """A fault of ours has ended a wire."""


class WireUser(Protocol):
    """What a link attaches its wires to: a `Sender`, or another owner of rows."""

    confirm_times: Histogram

    @property
    def in_flight(self) -> int: ...

    def attach(self, wire: Wire | None) -> None: ...

    def attach_prober(self, prober: Prober | None) -> None: ...

    def settle(self, settled: Settled) -> None: ...


class BrokerLink:
    """The broker's side of the node; `run` attaches a wire to the sender whenever there is a channel.

    Args:
        stamp: headers for every message, added to the usual ones.
        barring: see `Refusals`.
        topology: the link declares it once, with the default exchange, before it sets `up`.
        start_timeout: seconds in which there must be a first connection, or infinity; by default
            `broker.connect_timeout`.
    Attributes:
        up: set when the first channel is open.
        reconnects: connections that were lost, by reason (`broker.kind_of_end`).
    """

    def __init__(
        self,
        settings: Settings,
        sender: WireUser,
        health: Health,
        stamp: Mapping[str, str | int] | None = None,
        *,
        barring: bool = False,
        topology: TopologySettings | None = None,
        start_timeout: float | None = None,
    ) -> None:
        self._settings = settings
        self._sender = sender
        self._health = health
        self._start_timeout = settings.broker.connect_timeout if start_timeout is None else start_timeout
        self._router = router = Router.of(settings)
        self._identity = MessageIdentity.of(settings, stamp)
        self._refusals = Refusals(router, health, sender.settle, barring=barring)
        self._undeclared = undeclared(settings.broker, listed(topology) if topology else ())
        self._broker = settings.broker  # with the hosts of the last `use_hosts`
        self._connection: Connection | None = None
        self._left: Connection | None = None  # a connection whose host is no longer configured
        self._refused_all: RefusedAll | None = None  # by the broker, on the last connection
        self._blocked_before = 0.0  # on connections that have ended
        self._renew_after = RENEW_AFTER
        self._deaf_after = settings.broker.confirm_timeout
        self._confirmed_at = -inf  # what `Refusals` said at the last look
        self.up = asyncio.Event()
        self.reconnects: dict[str, int] = Counter()

    @property
    def blocked_seconds(self) -> float:
        """The seconds for which the broker has blocked publishing since the start."""
        return self._blocked_before + (self._connection.blocked_seconds if self._connection is not None else 0.0)

    @property
    def can_deliver(self) -> bool:
        """Whether messages can go out, or could until a moment ago.

        True also while the broker blocks publishing: its alarm holds up every node.
        """
        is_blocked = self._connection is not None and self._connection.blocked is not None
        return self.up.is_set() and (is_blocked or self._health.degraded_for("broker") <= HINDERED_AFTER)

    async def run(self) -> None:
        """Stay connected until cancelled.

        Raises:
            BrokerUnavailableError: there never was a connection, for longer than `start_timeout`.
            WireFaultError: a fault of ours; another `run` can go on.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._start_timeout
        failures = 0
        lost: Connection | None = None
        while True:
            chosen = self._broker
            try:
                connection = await broker.connect(chosen, f"relay {self._settings.relay.node}", after=lost)
            except BrokerUnavailableError as error:
                reason, is_refusal = Hindrance.of(error), error.is_refusal
            else:
                connected_at = loop.time()
                ended = await self._use_to_the_end(connection, chosen)
                if ended.was_left:
                    lost = None
                    continue
                lost, reason, is_refusal = connection, ended.reason, ended.is_refusal
                if self._refusals.confirmed_at >= connected_at or loop.time() - connected_at >= LASTED_AFTER:
                    failures = 0
            if not self.up.is_set() and loop.time() >= give_up_at:
                raise BrokerUnavailableError(reason, is_refusal=is_refusal, public=reason.public)
            waits = {} if self.up.is_set() or isinf(give_up_at) else {"gives_up_in_s": round(give_up_at - loop.time())}
            self._health.degrade("broker", reason, is_refusal=is_refusal, **waits)
            failures += 1
            await asyncio.sleep(backoff(failures, RECONNECT_INITIAL, RECONNECT_MAX))

    async def use_hosts(self, url: SecretStr) -> None:
        """Connect to the hosts of this `broker.url` from now on.

        The relay leaves a connection to any other host. It sends no more rows on it, and closes it when the rows in
        flight have settled, or after `relay.drain_timeout`.
        """
        self._broker = self._broker.model_copy(update={"url": url})
        if self._connection is not None:
            await self._leave_unlisted(self._connection)

    async def _leave_unlisted(self, connection: Connection) -> None:
        if not await is_listed(connection.host, broker_urls(self._broker), self._broker.connect_timeout):
            self._left = connection

    async def _use_to_the_end(self, connection: Connection, chosen: BrokerSettings) -> LinkEnded:
        """Publish through one connection, made by these settings, until it is lost, or left for other hosts."""
        self._connection = connection
        prober = Prober(connection, self._wire_on, self._sender.settle, self._router)
        self._sender.attach_prober(prober)
        end: BaseException | None = None
        try:
            if self._broker is not chosen:
                await self._leave_unlisted(connection)
            await self._use(connection, prober)
        # CancelledError even when the task was not cancelled: the library raises it when the connection is lost.
        except (*LOSSES, asyncio.CancelledError) as error:
            if is_told_to_end():
                raise
            end = error
        finally:
            self._sender.attach(None)
            self._sender.attach_prober(None)
            try:
                await prober.close()
            finally:  # also when it is cancelled meanwhile
                self._blocked_before += connection.blocked_seconds
                self._connection = None
                end = connection.end or end  # the broker's own words are better than the errors that followed
                with suppress(asyncio.CancelledError):
                    await connection.hang_up()
        if is_told_to_end():  # while the connection closed, which takes seconds when the broker does not answer
            raise asyncio.CancelledError
        if end is None and self._left is connection:
            return LinkEnded(was_left=True)
        kind = kind_of_end(end)
        self.reconnects[kind] += 1
        if isinstance(end, RefusesAllError):
            refusal = Hindrance(words(end), PublicReason.ACCESS_REFUSED)
            return LinkEnded(was_left=False, reason=refusal, is_refusal=True)
        return LinkEnded(was_left=False, reason=loss_by(end, kind if end is None else words(end)))

    async def _use(self, connection: Connection, prober: Prober) -> None:
        await declare_at_start(connection, self._undeclared)  # empty on a reconnect
        if self._refused_all is not None:
            await prober.still_refuses_all(self._refused_all)
            self._check_refused(prober)
        while not connection.is_lost and self._left is not connection:
            async with answer_within("open a channel", self._settings.broker.connect_timeout):
                channel = await broker.open_channel(connection, confirms=CONFIRMS)
            verdict = await self._publish(connection, channel, prober)
            if verdict is LinkVerdict.OVERDUE:
                self._note_overdue(prober)
            if verdict is not LinkVerdict.CLOSED:
                await close_channel(channel)
            self._check_refused(prober)
            await asyncio.sleep(REOPEN_AFTER)

    def _note_overdue(self, prober: Prober) -> None:
        timeout = self._settings.broker.confirm_timeout
        if asyncio.get_running_loop().time() - self._refusals.confirmed_at >= timeout:
            prober.note_unanswered(timeout)
            self._check_deaf(prober)

    def _check_deaf(self, prober: Prober) -> None:
        """Raise if messages wait, and this host has confirmed nothing for too long."""
        if self._refusals.confirmed_at != self._confirmed_at:
            self._confirmed_at = self._refusals.confirmed_at
            self._deaf_after = self._settings.broker.confirm_timeout
            prober.unanswered_since = None
        elif (waited := prober.unanswered_for) >= self._deaf_after:
            self._deaf_after = min(2 * self._deaf_after, DEAF_AFTER_MAX)
            silence = f"nothing confirmed for {waited:.0f} s"
            raise BrokerSilentError(silence, silence)

    def _check_refused(self, prober: Prober) -> None:
        self._refused_all = prober.refused_all
        if self._refused_all is not None:
            raise RefusesAllError("the broker refuses every message:", self._refused_all.words)

    async def _publish(self, connection: Connection, channel: Underlay, prober: Prober) -> LinkVerdict:
        """Publish through one channel until it has closed or must be replaced."""
        wire = self._wire_on(channel, connection, self._refusals.settle)
        carrying = asyncio.create_task(wire.run(), name="wire")
        verdict = LinkVerdict.CLOSED
        try:
            self._sender.attach(wire)
            self._health.heal("broker")
            self.up.set()
            verdict = await self._watch(wire, connection, channel, carrying, prober=prober)
            if verdict is LinkVerdict.REFUSED:
                await self._settle_all(lambda: wire.in_flight, SETTLED_WITHIN, channel)
            elif verdict is LinkVerdict.LEFT:
                # Wait for the probes too, and for as long as at the end of the relay: no message should come twice.
                await self._settle_all(lambda: self._sender.in_flight, self._settings.relay.drain_timeout, channel)
        finally:
            self._sender.attach(None)  # first: the sender must not send into a closed wire
            carrying.cancel()
            await asyncio.wait([carrying])
            timeout = self._settings.broker.confirm_timeout
            late = wire.sent_before(connection.clock() - timeout / 2) if verdict is LinkVerdict.OVERDUE else []
            closed = await wire.close()
            judged: Sequence[Settled] = [each._replace(outcome=Outcome.UNKNOWN) for each in closed]
            try:
                if not is_told_to_end():
                    judged = await prober.judge(closed)
            finally:
                for lost in judged:
                    if verdict is LinkVerdict.OVERDUE:
                        self._refusals.settle_overdue(lost, late, timeout)
                    else:
                        self._sender.settle(lost)
        _raise_fault(carrying)
        return verdict

    def _wire_on(self, channel: Underlay, connection: Connection, settle: Settle) -> Wire:
        """Return a wire on this channel; with a tracer, it traces its batches."""
        frame_max = channel.connection.connection_tune.frame_max
        encoder = Encoder(channel.number, frame_max, self._router, self._identity)
        clock, times = connection.clock, self._sender.confirm_times
        if (tracer := tracing.tracer()) is None:
            return FrameWire(channel, encoder, settle, clock=clock, times=times)
        from relay.engine.send.traced_wire import TracedWire  # noqa: PLC0415  (imports OpenTelemetry)

        traced = TracedWire(tracer, connection.url, self._router, settle)
        traced.wire = FrameWire(channel, encoder, traced.settle, clock=clock, times=times)
        return traced

    async def _settle_all(self, in_flight: Callable[[], int], within: float, channel: Underlay) -> None:
        """Send no more, and wait for the rows in flight: a row for a queue that works should not go out twice."""
        self._sender.attach(None)
        loop = asyncio.get_running_loop()
        until = loop.time() + within
        # No event to wait for: the sender gets the outcomes, and the link does not.
        while in_flight() and not channel.closing.done() and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(REOPEN_AFTER)

    async def _watch(
        self, wire: Wire, connection: Connection, channel: Underlay, carrying: asyncio.Task[None], *, prober: Prober
    ) -> LinkVerdict:
        """Return why the channel is used no more, when it has closed or must be replaced."""
        clock = asyncio.get_running_loop().time
        opened_at = clock()
        closing = channel.closing  # the wire alone does not see a loss while the broker blocks publishing
        was_hindered = False
        while not closing.done() and not carrying.done():
            interval = WATCH_INTERVAL if wire.in_flight or was_hindered else until_tick(IDLE_INTERVAL)
            await asyncio.wait([carrying, closing], timeout=interval, return_when=asyncio.FIRST_COMPLETED)
            if self._left is connection:
                log.info("broker.left", host=str(connection.host), in_flight=self._sender.in_flight)
                return LinkVerdict.LEFT
            self._check_refused(prober)
            self._check_deaf(prober)
            hindrance = connection.hindrance
            if hindrance is not None:
                self._health.degrade("broker", hindrance)
            elif was_hindered:
                self._health.heal("broker")
            was_hindered = hindrance is not None
            # The connection's clock stands still while the broker blocks publishing. When the alarm clears, the broker
            # stores what was sent before. If the relay sent it again, it would make thousands of duplicates.
            waited = wire.unconfirmed_for(connection.clock())
            if waited > self._settings.broker.confirm_timeout:
                log.warning("confirm.timed_out", in_flight=wire.in_flight, seconds=round(waited, 1))
                return LinkVerdict.OVERDUE
            if (silent := connection.silent_for) > self._settings.broker.heartbeat * HEARTBEATS_UNTIL_GONE:
                silence = f"nothing heard for {silent:.0f} s"
                raise BrokerSilentError(silence, silence)
            self._refusals.report()
            if (since := self._refusals.since) is None:
                self._renew_after = RENEW_AFTER
            elif not was_hindered and clock() - max(since, opened_at) > self._renew_after:
                self._renew_after = min(2 * self._renew_after, RENEW_AFTER_MAX)
                return LinkVerdict.REFUSED
        return LinkVerdict.CLOSED


def _raise_fault(carrying: asyncio.Task[None]) -> None:
    """Raise what has ended a wire, unless that was the loss of its channel: the next one would end so, too, unseen."""
    error = None if carrying.cancelled() else carrying.exception()
    if error is not None and not isinstance(error, AMQPError | ChannelInvalidStateError | OSError):
        raise WireFaultError(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True)
class Undeclared:
    """An exchange, queue or binding to declare; with `compare`, an existing one is compared."""

    thing: Thing
    compare: bool
    attempts: int = 0


def undeclared(broker: BrokerSettings, things: Sequence[Thing]) -> deque[Undeclared]:
    """Return what to declare: the default exchange and the listed things; empty when `broker.declare` is off."""
    if not broker.declare:
        return deque()
    waiting = deque(Undeclared(thing, compare=True) for thing in things)
    if (exchange := default_exchange(broker, things)) is not None:
        waiting.appendleft(Undeclared(exchange, compare=False))
    return waiting


async def declare_at_start(connection: Connection, waiting: deque[Undeclared]) -> None:
    """Declare what waits, and log what differs or fails: the relay runs with what is there.

    What is declared is removed from `waiting`, so a reconnect does not declare it again.

    Raises:
        OSError: the connection was lost, or the broker does not answer; the rest can be declared on another connection.
    """
    while waiting:
        first = waiting[0]
        first.attempts += 1
        try:
            result = await declare(connection, first.thing, compare=first.compare)
        except OSError as error:
            if first.attempts == ATTEMPTS:
                waiting.popleft()
                _tell(failed(first.thing, error))
            raise
        waiting.popleft()
        _tell(result)


def _tell(result: Declared) -> None:
    kind, name = result.kind, result.name
    if result.standing is Standing.DECLARED:
        log.info("topology.declared", kind=kind, name=name)
    elif result.standing is Standing.DIFFERS:
        log.warning("topology.differs", kind=kind, name=name, reason=result.words, remedy=result.remedy)
    elif result.standing is Standing.FAILED:
        log.warning("topology.failed", kind=kind, name=name, reason=result.words, remedy=result.remedy)
