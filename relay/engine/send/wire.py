"""A channel in confirm mode: rows go in, and what became of each comes out, matched by delivery tag.

`FrameWire` is the fast way: it encodes the frames of many rows into one buffer, hands it to the library's writer
in one piece and counts confirms itself, without a task or a future a message. `PlainWire` (plain_wire.py) is the
library's documented way behind the same interface; both pass tests/engine/test_wire.py.

The fast way leans on four attributes of aiormq's channel, which are public but not documented: `frames`, `number`,
`write_queue` and `connection.connection_tune`. That is why pyproject.toml pins the version.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiormq.abc import AbstractChannel, ChannelFrame
from aiormq.exceptions import (
    AMQPChannelError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
from pamqp.commands import Basic, Channel
from pamqp.header import ContentHeader

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.frames import PIECE_BYTES, Encoder
from relay.engine.send.message import not_sent
from relay.engine.send.routes import Address, Router
from relay.observe.histogram import Histogram

Settle = Callable[[Settled], None]
NACKED = "the broker refused it for now (basic.nack)"
TIMED_EVERY = 16  # rows: brokers confirm a hundred at once, but one by one where several queues take turns
# RabbitMQ: "NOT_FOUND - no exchange 'x' in vhost '/'", "ACCESS_REFUSED - access to exchange 'x' in vhost '/' refused
# for user 'u'", and with permissions by topic "access to topic 'k' in exchange 'x' in vhost '/' refused for ...".
# They have 255 bytes at most: "..." stands for the rest, wherever that begins.
ADDRESS_NAMED = re.compile(r"(?:exchange|topic) '.*", re.DOTALL)
# Also what closes the whole connection: frames that the broker cannot read, or a message that it stumbles over.
BLAMES_A_MESSAGE = (
    AMQPChannelError,
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    ConnectionNotImplemented,
    ConnectionInternalError,
)


def returned_words(frame: Any) -> str:
    """Say in the broker's words why it returned a message."""
    return f"{frame.reply_code} {frame.reply_text}: nothing is bound for its routing key"


def after_close(rows: Sequence[Row], closing: asyncio.Future[Any], router: Router) -> list[Settled]:
    """Tell what became of the rows that were in flight when their channel went away.

    The broker closes a channel, and for some reasons the connection, on account of one message. When it is the
    message's address the broker's words name it; else, with one message in flight, it is that. An internal error (541)
    says only that a process of the broker's has died, of this message or of something else: no more than a suspicion.
    """
    if not rows:
        return []
    error = closing.exception() if closing.done() and not closing.cancelled() else None
    if not isinstance(error, BLAMES_A_MESSAGE):
        return [Settled(rows, Outcome.UNKNOWN, "the connection was lost before the confirm")]
    words = " ".join(str(arg) for arg in error.args if arg is not None)
    if isinstance(error, ChannelNotFoundEntity | ChannelAccessRefused):
        barred = [row for row in rows if _is_named(router.address(row), words)]
        if barred:
            others = [row for row in rows if not _is_named(router.address(row), words)]
            unknown = Settled(others, Outcome.UNKNOWN, "another message closed the channel before the confirm")
            return [Settled(barred, Outcome.BARRED, words), *([unknown] if others else [])]
    if len(rows) > 1 or isinstance(error, ConnectionInternalError):
        return [Settled(rows, Outcome.SUSPECT, words)]
    is_rejected = isinstance(error, ChannelPreconditionFailed)
    return [Settled(rows, Outcome.REJECTED if is_rejected else Outcome.REFUSED, words)]


def names_address(words: str) -> bool:
    """Whether the broker's words say that an exchange is missing, or that it or a topic is forbidden."""
    return ADDRESS_NAMED.search(words) is not None


def forbids_topic(words: str) -> bool:
    """Whether the broker's words forbid a topic, and not the whole exchange."""
    found = ADDRESS_NAMED.search(words)
    return found is not None and found[0].startswith("topic")


def _is_named(address: Address, words: str) -> bool:
    if (found := ADDRESS_NAMED.search(words)) is None:
        return False
    named = found[0].encode()
    expected = b"exchange '" + (address.exchange or b"amq.default") + b"' in vhost '"
    if named.startswith(b"topic"):
        expected = b"topic '" + address.routing_key + b"' in " + expected
    if named.startswith(expected):
        return True
    return words.endswith("...") and expected.startswith(named[:-3])


class Wire(Protocol):
    """What the publisher needs of a channel."""

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet settled."""

    def send(self, rows: Sequence[Row], redelivered: set[int]) -> None:
        """Send in this order; the outcome of each comes by the wire's `settle`, and never within this call.

        Rows whose id is in `redelivered` carry the header that says so.
        """

    async def run(self) -> None:
        """Carry what is sent until the channel closes."""

    async def close(self) -> list[Settled]:
        """Give what became of the rows still in flight when the wire is used no more."""

    def unconfirmed_for(self, now: float) -> float:
        """Tell for how many seconds the oldest row in flight has waited, by the clock that the wire was given."""

    def sent_before(self, moment: float) -> list[Row]:
        """Give the rows in flight that were sent before then, by that clock."""


class FrameWire:
    """The fast wire; see the module.

    Args:
        clock: tells when a row was sent; the event loop's unless given.
        times: learns how long confirms took.
    """

    def __init__(
        self,
        channel: AbstractChannel,
        encoder: Encoder,
        settle: Settle,
        clock: Callable[[], float] | None = None,
        *,
        times: Histogram | None = None,
    ) -> None:
        self._channel = channel
        self._encoder = encoder
        self._settle = settle
        self._times = times
        self._untimed = 0  # rows confirmed since one was timed
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._rows: dict[int, Row] = {}  # by delivery tag, in sending order
        self._tag = 0
        self._lowest = 1  # no tag below it is in flight
        self._sent_at: deque[tuple[int, float]] = deque()  # (last tag of a write, when)
        self._return: Basic.Return | None = None  # its header and body are still to come
        self._return_bytes = 0
        self._unsent: deque[Row] = deque()
        self._redelivered: set[int] = set()  # ids of such rows among these
        self._undrained = 0  # bytes written since they were last waited for
        self._wake = asyncio.Event()
        self._is_closing = False  # the broker closes the channel
        self._writing = asyncio.Lock()
        # Confirms are taken where the connection's reader puts them, before the channel's own reader, which
        # walks every pending tag for a `multiple` ack and needs a task switch for each frame.
        self._write_queue: asyncio.Queue[ChannelFrame] = channel.write_queue  # type: ignore[attr-defined]
        self._pass_on = channel.frames.put
        channel.frames.put = self._take  # type: ignore[method-assign]

    @property
    def in_flight(self) -> int:
        return len(self._rows) + len(self._unsent)

    def send(self, rows: Sequence[Row], redelivered: set[int]) -> None:
        self._unsent.extend(rows)
        if redelivered:
            self._redelivered.update(row.id for row in rows if row.id in redelivered)
        self._wake.set()

    async def run(self) -> None:
        closing = self._channel.closing
        closing.add_done_callback(lambda _: self._wake.set())
        while not closing.done():
            if self._unsent:
                await self._flush()
            await self._wake.wait()
            self._wake.clear()

    async def close(self) -> list[Settled]:
        self._channel.frames.put = self._pass_on  # type: ignore[method-assign]
        lost = (*self._rows.values(), *self._unsent)
        self._rows.clear()
        self._unsent.clear()
        return after_close(lost, self._channel.closing, self._encoder.router)

    async def _flush(self) -> None:
        """Write what was sent, piece by piece; a broker that reads nothing is given no more than two of them."""
        while self._unsent:
            await self._channel.connection.ready()  # held back while the broker blocks us: buffers would grow
            written = None
            async with self._writing:
                if self._is_closing:  # what follows the library's answer to that would end the connection
                    return
                payload = self._encode()
                self._sent_at.append((self._tag, self._clock()))
                self._undrained += len(payload)
                if self._undrained >= PIECE_BYTES:  # wait until they are out
                    written, self._undrained = self._loop.create_future(), 0
                await self._write_queue.put(ChannelFrame(payload, should_close=False, drain_future=written))
                del payload
            if written is not None:  # never set when the connection is lost
                await asyncio.wait([written, self._channel.closing], return_when=asyncio.FIRST_COMPLETED)
                # The library's writer keeps the last frame until the next one comes: let that be an empty one.
                await self._write_queue.put(ChannelFrame(b"", should_close=False))

    def _encode(self) -> bytes:
        """Return the frames of the next rows, which are in flight from now on."""
        encoded = self._encoder.encode(self._unsent, self._redelivered)
        rows = [self._unsent.popleft() for _ in range(encoded.rows)]
        if self._redelivered:
            self._redelivered.difference_update(row.id for row in rows)
        if encoded.refused:
            for index, error in encoded.refused.items():
                self._loop.call_soon(self._settle, Settled((rows[index],), Outcome.UNSENDABLE, not_sent(error)))
            rows = [row for index, row in enumerate(rows) if index not in encoded.refused]
        self._rows.update(enumerate(rows, self._tag + 1))
        self._tag += len(rows)
        return encoded.frames

    def unconfirmed_for(self, now: float) -> float:
        if not self._rows:
            self._sent_at.clear()
            return 0.0
        oldest = next(iter(self._rows))
        while self._sent_at and self._sent_at[0][0] < oldest:
            self._sent_at.popleft()
        return now - self._sent_at[0][1] if self._sent_at else 0.0

    def sent_before(self, moment: float) -> list[Row]:
        last = max((tag for tag, at in self._sent_at if at < moment), default=0)
        return [row for tag, row in self._rows.items() if tag <= last]

    async def _take(self, item: tuple[int, Any]) -> None:
        """Take confirms and returns; everything else goes on to the channel."""
        frame = item[1]
        kind = type(frame)
        if kind is Basic.Ack:
            self._confirm(frame.delivery_tag, frame.multiple, Outcome.CONFIRMED)
        elif kind is Basic.Nack:
            self._confirm(frame.delivery_tag, frame.multiple, Outcome.NACKED)
        elif kind is Basic.Return:
            self._return = frame
        elif kind is Channel.Close:
            async with self._writing:
                self._is_closing = True
            await self._pass_on(item)
        elif self._return is not None:
            self._read_return(frame)
        else:
            await self._pass_on(item)

    def _confirm(self, tag: int, multiple: bool, outcome: Outcome) -> None:
        pop = self._rows.pop
        if multiple:
            rows = [row for t in range(self._lowest, tag + 1) if (row := pop(t, None)) is not None]
            self._lowest = tag + 1
        else:
            rows = [row] if (row := pop(tag, None)) is not None else []
            if tag == self._lowest:
                self._lowest = tag + 1
        if rows:
            if outcome is Outcome.CONFIRMED and self._times is not None:
                self._untimed += len(rows)
                if self._untimed >= TIMED_EVERY or not self._rows:
                    self._time(self._times, tag - len(rows) // 2)
            self._settle(Settled(rows, outcome, "" if outcome is Outcome.CONFIRMED else NACKED))

    def _time(self, times: Histogram, tag: int) -> None:
        """Note how long this row took, for all that were confirmed since the last that was timed."""
        sent_at = next((at for last, at in self._sent_at if last >= tag), None)
        if sent_at is not None:
            times.observe(self._clock() - sent_at, self._untimed)
        self._untimed = 0
        while self._sent_at and self._sent_at[0][0] < self._lowest:
            self._sent_at.popleft()

    def _read_return(self, frame: Any) -> None:
        """Take the header and the body frames that follow a return; they name the row by its outbox id.

        Not by message_id, as the library does: two messages in flight may carry the same one. The ack that the
        broker sends after the return then finds no row.
        """
        if type(frame) is ContentHeader:
            self._return_bytes = frame.body_size or 0
            returned, headers = self._return, frame.properties.headers or {}
            tag = next((tag for tag, row in self._rows.items() if row.id == headers.get("x-outbox-id")), None)
            if tag is not None and returned is not None:
                self._settle(Settled((self._rows.pop(tag),), Outcome.RETURNED, returned_words(returned)))
        else:
            self._return_bytes -= len(frame.value)
        if self._return_bytes <= 0:
            self._return = None
