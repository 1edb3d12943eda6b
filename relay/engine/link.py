"""Keep a connection to the broker: host after host, with a new channel when the broker closes one."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import aio_pika
import structlog
from aio_pika.abc import AbstractConnection
from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, ChannelNotFoundEntity

from relay import broker
from relay.backoff import backoff
from relay.engine.frames import Encoder
from relay.engine.health import Health
from relay.engine.message import Identity
from relay.engine.plain import PlainWire
from relay.engine.publish import Publisher
from relay.engine.routes import Router
from relay.engine.wire import FrameWire, Wire
from relay.errors import BrokerUnavailableError
from relay.settings import Settings
from relay.settings import Wire as WireChoice

log = structlog.get_logger(__name__)

WATCH_INTERVAL = 0.25  # seconds
CLOSE_TIMEOUT = 2.0  # seconds; a mute broker does not answer the close either
RECONNECT_INITIAL, RECONNECT_MAX = 0.1, 3.0  # seconds; ready again within 5 s of the heal
REOPEN_AFTER = 0.02  # seconds; a row that closes each channel must not make a hot loop


class Link:
    """The broker's side of the node; `run` attaches a wire to the publisher whenever there is a channel.

    Args:
        stamp: headers for every message beside the usual ones.
        patience: seconds in which there must be a first connection; `broker.connect_timeout` unless given.
    Attributes:
        up: set once there was a channel.
    """

    def __init__(
        self,
        settings: Settings,
        publisher: Publisher,
        health: Health,
        stamp: Mapping[str, str | int] | None = None,
        *,
        patience: float | None = None,
    ) -> None:
        self._settings = settings
        self._publisher = publisher
        self._health = health
        self._patience = settings.broker.connect_timeout if patience is None else patience
        self._router = Router(settings.routes, settings.broker.exchange)
        self._identity = Identity(settings.broker.app_id.encode(), settings.relay.max_message_bytes, stamp or {})
        self.up = asyncio.Event()

    async def run(self) -> None:
        """Stay connected until cancelled.

        Raises:
            BrokerUnavailableError: there never was a connection, for longer than `patience`.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience
        failures = 0
        while True:
            try:
                connection = await broker.connect(self._settings.broker, f"relay {self._settings.relay.node}")
            except BrokerUnavailableError as error:
                if not self.up.is_set() and loop.time() >= give_up_at:
                    raise
                waits = {} if self.up.is_set() else {"gives_up_in_s": round(give_up_at - loop.time())}
                self._health.degrade("broker", str(error), **waits)
                failures += 1
                await asyncio.sleep(backoff(failures, RECONNECT_INITIAL, RECONNECT_MAX))
                continue
            failures = 0
            try:
                await self._use(connection)
            # CancelledError as well when nobody asked for it: the library raises it when the connection goes away.
            except (AMQPError, OSError, RuntimeError, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._health.degrade("broker", f"connection lost: {error or type(error).__name__}")
            finally:
                self._publisher.attach(None)
                with suppress(TimeoutError, AMQPError, OSError, asyncio.CancelledError):
                    await asyncio.wait_for(connection.close(), CLOSE_TIMEOUT)

    async def _use(self, connection: AbstractConnection) -> None:
        """Publish through one connection until it is lost."""
        if self._settings.broker.declare and not self.up.is_set():
            await self._declare(connection)
        while not connection.is_closed:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            underlay = await channel.get_underlay_channel()
            wire = self._wire(underlay)
            carrying = asyncio.create_task(wire.run(), name="wire")
            try:
                self._publisher.attach(wire)
                self._health.heal("broker")
                self.up.set()
                await self._watch(wire, underlay, carrying)
            finally:
                self._publisher.attach(None)  # first: nothing is sent into a wire that is closed
                carrying.cancel()
                await asyncio.wait([carrying])
                if (lost := await wire.close()) is not None:
                    self._publisher.settle(lost)
            await asyncio.sleep(REOPEN_AFTER)

    async def _declare(self, connection: AbstractConnection) -> None:
        """Declare the default exchange when it is missing: at start only, never on a reconnect."""
        name = self._settings.broker.exchange
        if not name:
            return
        try:
            channel = await connection.channel()
            await channel.declare_exchange(name, passive=True)
            await channel.close()
        except ChannelNotFoundEntity:
            channel = await connection.channel()
            await channel.declare_exchange(name, aio_pika.ExchangeType.TOPIC, durable=True)
            await channel.close()
            log.info("exchange.declared", exchange=name)

    def _wire(self, channel: AbstractChannel) -> Wire:
        if self._settings.relay.wire is WireChoice.PUBLISH:
            return PlainWire(channel, self._router, self._identity, self._publisher.settle)
        frame_max = channel.connection.connection_tune.frame_max
        encoder = Encoder(channel.number, frame_max, self._router, self._identity)
        return FrameWire(channel, encoder, self._publisher.settle)

    async def _watch(self, wire: Wire, channel: AbstractChannel, carrying: asyncio.Task[None]) -> None:
        """Return when the channel has closed; close it when a confirm is overdue."""
        timeout = self._settings.broker.confirm_timeout
        loop = asyncio.get_running_loop()
        was_blocked = False
        blocked_for = 0.0
        while not carrying.done():
            await asyncio.wait([carrying], timeout=WATCH_INTERVAL)
            blocked = await _is_blocked(channel)
            if blocked:
                # The clock of the confirms stands still: what was sent is stored when the alarm clears, and
                # sending it again would make thousands of duplicates.
                blocked_for += WATCH_INTERVAL
                self._health.degrade("broker", "it blocks publishers (connection.blocked: memory or disk alarm)")
            elif was_blocked:
                self._health.heal("broker")
            was_blocked = blocked
            if not wire.in_flight:
                blocked_for = 0.0
            waited = wire.unconfirmed_for(loop.time()) - blocked_for
            if waited > timeout:
                log.warning("confirm.timed_out", in_flight=wire.in_flight, seconds=round(waited, 1))
                raise OSError(f"no confirm within {timeout:g} s")


async def _is_blocked(channel: AbstractChannel) -> bool:
    try:
        # The library's only public sign: this waits while the broker blocks us.
        async with asyncio.timeout(0.01):
            await channel.connection.ready()
    except TimeoutError:
        return True
    return False
