"""Connections to RabbitMQ: a list of hosts, a deadline on every step, and no password in any error."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from traceback import walk_tb
from typing import Any

import aio_pika
from aio_pika.abc import ConnectionParameter, UnderlayConnection
from aio_pika.tools import OneShotCallback
from aiormq.abc import AbstractChannel, ChannelFrame
from aiormq.connection import TransportFactory
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelPreconditionFailed,
    ConnectionClosed,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from pamqp.commands import Channel as ChannelMethods
from pamqp.commands import Connection as Methods
from yarl import URL

from relay.config.settings import BrokerSettings
from relay.config.tls import TlsFileError, error_words, tls_context
from relay.errors import BrokerUnavailableError, ConsumerError, PublicReason, no_answer_within
from relay.runtime.hindrance import Hindrance
from relay.runtime.scrub import scrub
from relay.servers.rabbitmq.hosts import BrokerHost, broker_urls, in_turn
from relay.servers.rabbitmq.insides import Underlay, hear_of_blocks, last_frame_at, write_queue

HEARTBEATS_UNTIL_GONE = 2  # a peer that has said nothing, or whose kernel has taken nothing, for so many
MISSED_HEARTBEATS = 1.5  # after which nothing goes through; the library waits three times as long, and a bit
CLOSE_TIMEOUT = 1.0  # seconds in which a broker that lives answers a close
ACCESS_REFUSED, NOT_ALLOWED = 403, 530  # AMQP's codes for a user, and for a virtual host
UNNAMED = PublicReason.UNNAMED
SILENT, LOST, OTHER = "silent", "lost", "other"  # no word for too long; ended without a word; another word
# AMQP's words for why the broker ends a connection, as the label `reason` of the metrics has them: a closed list.
ENDS = frozenset(
    {
        "access_refused",
        "channel_error",
        "command_invalid",
        "connection_forced",
        "frame_error",
        "internal_error",
        "invalid_path",
        "not_allowed",
        "not_found",
        "not_implemented",
        "resource_error",
        "syntax_error",
        "unexpected_frame",
    }
)
CHANNEL_LOST = (AMQPError, ChannelInvalidStateError, OSError)  # TimeoutError is an OSError
# Up to 4.2 the broker closes the channel then, with the code of any failed precondition: only its words tell which.
DELIVERY_TIMEOUT = "delivery acknowledgement on channel"
ALARMS = frozenset({"memory", "disk", "memory & disk"})  # RabbitMQ's words for what it is low on

# What a stranger may know of an error that ends a connection, or keeps one from being made.
PUBLIC_BY_END = {
    "access_refused": PublicReason.ACCESS_REFUSED,
    "not_allowed": PublicReason.ACCESS_REFUSED,
    "connection_forced": PublicReason.SESSION_ENDED,
}
PUBLIC_BY_TYPE: dict[type[BaseException] | tuple[type[BaseException], ...], PublicReason] = {
    (ssl.SSLError, TlsFileError): PublicReason.TLS_FAILED,
    (AuthenticationError, ProbableAuthenticationError, ChannelAccessRefused): PublicReason.ACCESS_REFUSED,
    ConnectionRefusedError: PublicReason.CONNECTION_REFUSED,
    (ConnectionResetError, BrokenPipeError): PublicReason.CONNECTION_RESET,
}
PUBLIC_BY_ERRNO = {
    errno.EHOSTUNREACH: PublicReason.NO_ROUTE,
    errno.ENETUNREACH: PublicReason.NETWORK_UNREACHABLE,
    errno.ETIMEDOUT: PublicReason.CONNECTION_TIMED_OUT,
}


class BrokerSilentError(TimeoutError):
    """The broker has said nothing for too long.

    Attributes:
        public: what strangers may know of it.
    """

    def __init__(self, words: str, public: str) -> None:
        super().__init__(words)
        self.public = public


class Connection(aio_pika.Connection):
    """A connection that knows why the broker blocks it, and why it was lost; `connect` opens it.

    It is not aio-pika's robust connection. That one declares exchanges and queues again after a reconnect, which loses
    messages in a network split. And a publisher must know that the connection was lost.

    Attributes:
        host: the host that it leads to.
        blocked: the broker's reason for blocking publishes (`memory`, `disk`); None while it takes them.
    """

    PARAMETERS = (
        *aio_pika.Connection.PARAMETERS,
        ConnectionParameter(name="transport_factory", parser=lambda factory: factory, is_kwarg=True),
    )

    def __init__(self, host: BrokerHost, broker: BrokerSettings, name: str) -> None:
        self.host = host
        self._heartbeat = broker.heartbeat
        self._socket = _Socket(host, timeout=broker.heartbeat * HEARTBEATS_UNTIL_GONE)
        super().__init__(
            # With the library's 60 s, it would take minutes to notice a broker that does not answer.
            host.url.update_query(heartbeat=str(broker.heartbeat)),
            client_properties={"connection_name": name, "product": broker.app_id},
            transport_factory=self._socket,
        )
        self.blocked: str | None = None
        self._blocked_at = 0.0
        self._blocked_before = 0.0

    def __del__(self) -> None:
        """Do nothing, in place of the library's method.

        That one closes the connection in whichever event loop runs then, and Python warns when no loop runs. A
        connection that was opened is closed by `hang_up`; any other has nothing to close.
        """

    async def connect(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  (the library's signature)
        underlay = Underlay(self.url, **self.kwargs)
        try:
            async with asyncio.timeout(timeout):
                await underlay.connect()
                await underlay.ready()
        except StopAsyncIteration:  # the library raises this when the stream ends before it reads
            raise AMQPConnectionError("closed before the broker's greeting") from None
        except BaseException:
            # The broker may have let in a task that was cancelled just then: nobody else would close this.
            await self._end(underlay.close())
            raise
        closed = OneShotCallback(self._on_connection_close)
        underlay.closing.add_done_callback(closed)
        self.transport = UnderlayConnection(underlay, closed)
        await self._on_connected()
        self._underlay, self._closing = underlay, underlay.closing
        hear_of_blocks(underlay, self._block, self._unblock)

    @property
    def blocked_seconds(self) -> float:
        """For how long the broker has blocked us, until now."""
        now = self.loop.time() - self._blocked_at if self.blocked is not None else 0.0
        return self._blocked_before + now

    @property
    def silent_for(self) -> float:
        """For how many seconds nothing has come: an idle broker sends a heartbeat within each `broker.heartbeat`."""
        return self.loop.time() - last_frame_at(self._underlay)

    @property
    def hindrance(self) -> Hindrance | None:
        """Why nothing goes through, as far as is known while it is open; None when nothing is known against it."""
        if self.blocked is not None:
            words = f"broker blocked ({self.blocked})"
            return Hindrance(words, words if self.blocked in ALARMS else PublicReason.BLOCKED)
        silence = self._heartbeat * MISSED_HEARTBEATS
        if self.silent_for > silence:
            return Hindrance.plain(f"nothing has come from it for {silence:g} s")
        return None

    def clock(self) -> float:
        """Return a time in seconds that stands still while the broker blocks us."""
        return self.loop.time() - self.blocked_seconds

    @property
    def tls(self) -> ssl.SSLObject | None:
        """The encryption of a connection by amqps, with the broker's certificate."""
        return self._socket.tls

    @property
    def is_lost(self) -> bool:
        """Return whether it has ended; the library's `is_closed` is about our own `close`."""
        return self._closing.done()

    @property
    def end(self) -> BaseException | None:
        """What ended the connection: the broker's words, or what the socket said; None while it is open."""
        if not self._closing.done():
            return None
        return asyncio.CancelledError() if self._closing.cancelled() else self._closing.exception()

    @property
    def loss(self) -> Hindrance | None:
        """What ended the connection, in words; None while it is open."""
        if (end := self.end) is None:
            return None
        return loss_by(end, SILENT if isinstance(end, asyncio.CancelledError) else words(end))

    async def hang_up(self) -> None:
        """Close, without waiting for long: a mute broker answers no close, and the library would wait for seconds."""
        await self._end(self.close())

    async def _end(self, close: Coroutine[Any, Any, None]) -> None:
        closing = asyncio.create_task(close)
        try:
            await asyncio.wait([closing], timeout=CLOSE_TIMEOUT)
        finally:
            if not closing.done():
                self._socket.abort()
                await asyncio.wait([closing], timeout=CLOSE_TIMEOUT)
            if closing.done() and not closing.cancelled():
                closing.exception()  # lost already: nothing is left to do

    def _block(self, frame: Any) -> None:
        if self.blocked is None:
            self._blocked_at = self.loop.time()
        self.blocked = str(frame.reason or "no reason given").removeprefix("low on ")
        # It reads nothing now, and an alarm may last: a full receive buffer must not count as a lost peer.
        self._socket.be_patient(for_ever=True)

    def _unblock(self, _: Any) -> None:
        self._blocked_before, self.blocked = self.blocked_seconds, None
        self._socket.be_patient(for_ever=False)


class _Socket(TransportFactory):
    """Opens the socket, and sets its time-out: the kernel would wait 15 minutes for a dead peer."""

    def __init__(self, host: BrokerHost, timeout: float) -> None:
        self._host = host
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._transport: asyncio.WriteTransport | None = None
        self.tls: ssl.SSLObject | None = None

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to this one address; the library's factories would also try the name's other addresses.

        The certificate must be for the name.
        """
        is_secure = url.scheme == "amqps"
        context = await asyncio.to_thread(tls_context, url) if is_secure else None
        name = url.host if is_secure else None
        reader, writer = await asyncio.open_connection(self._host.address, url.port, ssl=context, server_hostname=name)
        self._socket, self.tls = writer.get_extra_info("socket"), writer.get_extra_info("ssl_object")
        self._transport = writer.transport
        self.be_patient(for_ever=False)
        return reader, writer

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def be_patient(self, *, for_ever: bool) -> None:
        if self._socket is not None:
            milliseconds = 0 if for_ever else round(self._timeout * 1000)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


async def connect(broker: BrokerSettings, name: str, *, after: Connection | None = None) -> Connection:
    """Return a connection to the first host that accepts it.

    Args:
        name: shown in the broker's list of connections.
        after: a lost connection; its host is tried last, as it may accept connections and never answer.
    Raises:
        BrokerUnavailableError: no host accepts the connection; the error names each host with its reason.
    """
    errors: list[BrokerUnavailableError] = []
    lost = after.host if after is not None else None
    async with aclosing(in_turn(broker_urls(broker), after=lost, within=broker.connect_timeout)) as hosts:
        async for host in hosts:
            try:
                if isinstance(host, BrokerUnavailableError):
                    raise host
                return await connect_to(host, broker, name)
            except BrokerUnavailableError as error:
                errors.append(error)
    raise BrokerUnavailableError(
        "; ".join(map(str, errors)),
        is_refusal=any(error.is_refusal for error in errors),
        public=next((error.public for error in errors if error.public != UNNAMED), UNNAMED),
    )


async def connect_to(host: BrokerHost, broker: BrokerSettings, name: str) -> Connection:
    """Open a connection to this host, as `connect` does.

    Raises:
        BrokerUnavailableError: it does not let us in; it names the host and why. Its cause is the broker's refusal.
    """
    connection = Connection(host, broker, name)
    cause: BaseException | None = None
    try:
        await connection.connect(timeout=broker.connect_timeout)
    except TimeoutError:
        reason = public = no_answer_within(broker.connect_timeout)
    except (AMQPError, OSError) as error:
        cause = _refusal(error)
        reason, public = words(cause), public_reason(cause)
    except asyncio.CancelledError:
        # The library raises it, too, when the peer resets the connection during the handshake.
        if is_told_to_end():
            raise
        reason, public = "the connection was reset", PublicReason.CONNECTION_RESET
    else:
        return connection
    raise BrokerUnavailableError(scrub(f"{host}: {reason}"), is_refusal=_is_refusal(cause), public=public) from cause


async def close_channel(channel: AbstractChannel) -> None:
    """Close a channel at the broker, without waiting for the answer; the library handles the answer when it comes.

    A channel that waits for a node that is gone does not answer.
    """
    frame = ChannelMethods.Close(reply_code=200, reply_text="", class_id=0, method_id=0)
    await write_queue(channel).put(ChannelFrame.marshall(channel.number, [frame]))


async def open_channel(connection: Connection, *, confirms: bool = False) -> AbstractChannel:
    """Return a channel of aiormq: aio-pika's would make a second task and a large object for each delivery.

    It waits for the broker without a limit: use it within `answer_within`, or use `open_channel_within`.

    Args:
        confirms: use publisher confirms; an unroutable message raises.
    Raises:
        AMQPError, OSError, RuntimeError: the connection was lost, or has no channel number left.
        CancelledError: also when the connection was lost, see `is_told_to_end`.
    """
    try:
        opened = await connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
    except ValueError as error:  # the library raises this when no channel number is left
        raise ConnectionError(str(error)) from error
    channel = await opened.get_underlay_channel()
    if is_told_to_end():  # the library swallows a cancel while it opens a channel
        raise asyncio.CancelledError
    return channel


async def open_channel_within(connection: Connection, within: float, *, confirms: bool = False) -> AbstractChannel:
    """Return a channel as `open_channel` does.

    Raises:
        BrokerUnavailableError: the connection was lost, or the broker did not answer within `within` seconds.
    """
    try:
        async with answer_within("open a channel", within):
            return await open_channel(connection, confirms=confirms)
    except (AMQPError, OSError, RuntimeError) as error:
        reason = connection.loss or hindrance_of(error)
        raise BrokerUnavailableError(reason, public=reason.public) from error


@asynccontextmanager
async def answer_within(what: str, within: float) -> AsyncIterator[None]:
    """Wait for the broker's answer.

    Raises:
        BrokerSilentError: `what` had no answer within so many seconds.
        ConnectionResetError: the connection went away meanwhile, which the library says by a CancelledError.
    """
    try:
        async with asyncio.timeout(within):
            yield
    except TimeoutError:
        silence = no_answer_within(within)
        raise BrokerSilentError(f"{what}: {silence}", silence) from None
    except asyncio.CancelledError:
        if is_told_to_end():
            raise
        raise ConnectionResetError(f"{what}: the connection was lost") from None
    if is_told_to_end():
        # The library swallows a cancellation while it closes a channel; the task that asked for it would wait without
        # end.
        raise asyncio.CancelledError


def is_told_to_end() -> bool:
    """Return whether another task has cancelled the current one.

    The library raises CancelledError also on its own account, and swallows some that were meant for us.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def words(error: BaseException) -> str:
    """Return what the broker or the kernel said, on one line."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error_words(error)}"
    if isinstance(error, AuthenticationError):  # the library's own, before it has sent a password
        offered = " ".join(sorted(str(error.args[0]).split()))
        return f"the broker offers the mechanisms {offered}, and not the one of the parameter auth"
    return " ".join(_text(error.args).split()) or type(error).__name__


def is_delivery_timeout(channel: AbstractChannel) -> bool:
    """Whether the broker has closed this channel because a delivery was unacknowledged for too long."""
    if not channel.closing.done() or channel.closing.cancelled():
        return False
    end = channel.closing.exception()
    return isinstance(end, ChannelPreconditionFailed) and DELIVERY_TIMEOUT in words(end)


def hindrance_of(error: BaseException) -> Hindrance:
    """Return what the broker or the kernel said, on one line."""
    return Hindrance(words(error), public_reason(error))


def loss_by(end: BaseException | None, said: str) -> Hindrance:
    """Return in words, with what was said, that a connection was lost, and by which error."""
    public = UNNAMED if end is None else public_reason(end)
    return Hindrance(f"connection lost: {said}", PublicReason.CONNECTION_LOST if public == UNNAMED else public)


def public_reason(error: BaseException | None) -> str:
    """Return what a stranger may know of an error: its type decides, or that of the error that it followed from."""
    while error is not None:
        if isinstance(error, BrokerUnavailableError | BrokerSilentError | ConsumerError):
            return error.public
        if isinstance(error, ConnectionClosed) and (named := PUBLIC_BY_END.get(kind_of_end(error))):
            return named
        if isinstance(error, OSError) and (named := PUBLIC_BY_ERRNO.get(error.errno or 0)):
            return named
        if named := next((public for types, public in PUBLIC_BY_TYPE.items() if isinstance(error, types)), None):
            return named
        error = error.__cause__
    return UNNAMED


def kind_of_end(end: BaseException | None) -> str:
    """Return why a connection was lost, for a counter: a word of `ENDS`, `lost`, `silent` or `other`."""
    if isinstance(end, ConnectionClosed):
        word = _text(end.args[-1:]).partition(" ")[0].lower()
        return word if word in ENDS else OTHER
    # The library's own heartbeat ends what was silent by a cancellation.
    return SILENT if isinstance(end, (TimeoutError, asyncio.CancelledError)) else LOST


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the broker refused the user or the virtual host."""
    if isinstance(error, ConnectionClosed):
        return error.args[0] in (ACCESS_REFUSED, NOT_ALLOWED)
    return isinstance(error, (AuthenticationError, ProbableAuthenticationError))


def _refusal(error: BaseException) -> BaseException:
    """Return the broker's refusal of the virtual host, if there is one.

    The library does not put the frame with the broker's text into its error, so it is read from the traceback.
    """
    for frame, _ in walk_tb(error.__traceback__):
        close = frame.f_locals.get("frame")
        if isinstance(error, InvalidFrameError) and isinstance(close, Methods.Close):
            return ConnectionClosed(close.reply_code, close.reply_text)
    return error


def _text(args: Sequence[object]) -> str:
    return " ".join(str(arg) for arg in args if arg is not None)
