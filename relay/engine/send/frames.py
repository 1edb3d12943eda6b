"""The wire to the broker: encode rows into AMQP 0-9-1 frames, many into one buffer, and match the broker's confirms.

`FrameWire` hands the frames of many rows to the library's writer in one piece, and counts confirms itself. No message
costs a task or a future.

The library encodes one message at a time, in 20 us or more. `Encoder` makes a template of what all messages of a kind
share. A row then costs two struct packs, about 1 us. This is the pure codec. `compiled_frames.pyx` writes the same
bytes without an object for each field, and `codec` chooses one of the two.
Layout: AMQP 0-9-1 specification, sections 2.3.5 and 4.2. tests/engine/test_frames.py decodes the frames of both codecs
with the library, and compares them with the library's properties.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from aiormq.abc import AbstractChannel, ChannelFrame
from pamqp.commands import Basic, Channel
from pamqp.header import ContentHeader

from relay.config.settings import CloudEvents
from relay.engine.row import Address, Outcome, Row, Settled
from relay.engine.send import cloudevents
from relay.engine.send.message import (
    ENCODING_ERRORS,
    LAST_SECOND,
    PERSISTENT,
    POSTGRES_EPOCH,
    MessageIdentity,
    UnsendableError,
    check_header_frame,
    check_row,
    content_type,
    extra_headers,
    not_sent,
    unix_time,
)
from relay.engine.send.routes import Router
from relay.engine.send.wire import NACKED, Settle, after_close, returned_words
from relay.observe.histogram import Histogram
from relay.outbox.declared import VERSION
from relay.servers.rabbitmq.content_header import encode_table
from relay.servers.rabbitmq.insides import give_frames_back, take_frames, write_queue

TIMED_EVERY = 16  # rows: a broker confirms a hundred at once, but single rows when several queues confirm in turn
METHOD, HEADER, BODY, END = 1, 2, 3, b"\xce"
FRAME_START = BODY_START = struct.Struct(">BHI")  # type, channel, size
BASIC, PUBLISH, MANDATORY = 60, 40, 1
BASIC_CONTENT = BASIC << 16  # class and weight, the first fields of a content header
KEY_ENTRY = b"\x0ex-aggregate-idS"
WRITER_ENTRY = b"\x0fx-outbox-writerS"
WRAPPED_ENTRY = b"\x14x-outbox-cloudeventsS\x00\x00\x00\x0astructured"
# content-type, headers, delivery-mode, message-id, timestamp, type, app-id
FLAGS = 1 << 15 | 1 << 13 | 1 << 12 | 1 << 7 | 1 << 6 | 1 << 5 | 1 << 3
FRAME_OVERHEAD = 8  # type, channel, size and end mark
UNLIMITED = 128 * 1024  # bytes of a frame when the broker sets no limit: RabbitMQ's default
TEMPLATES_KEPT = 4096  # a limit of memory: each row may have a different address
PIECE_BYTES = 1024 * 1024  # of frames in one write: the library's writer holds them in memory, as well as their rows
MESSAGE_ID_BYTES = 36

Part = bytes | memoryview
Kind = tuple[bytes, bytes, bytes | None, bytes | None, bytes | None, bool, bytes, bytes | None]


class FrameWire:
    """A `wire.Wire` that writes frames itself.

    Args:
        clock: returns the time in seconds; by default the event loop's clock.
        times: records how long confirms took.
    """

    def __init__(
        self,
        channel: AbstractChannel,
        encoder: "Encoder",
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
        self._return: Basic.Return | None = None  # the return whose header and body have not come yet
        self._return_bytes = 0
        self._unsent: deque[Row] = deque()
        self._redelivered: set[int] = set()  # ids of rows in `_unsent` that may be repeats
        self._undrained = 0  # bytes written since the last wait for the socket
        self._wake = asyncio.Event()
        self._is_closing = False  # the broker closes the channel
        self._writing = asyncio.Lock()
        # The wire takes confirms from the connection's reader, before the channel's own reader gets them. That reader
        # walks over every pending tag for a `multiple` ack, and needs a task switch for each frame.
        self._write_queue = write_queue(channel)
        self._pass_on = take_frames(channel, self._take)

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
        give_frames_back(self._channel, self._pass_on)
        lost = (*self._rows.values(), *self._unsent)
        self._rows.clear()
        self._unsent.clear()
        return after_close(lost, self._channel.closing, self._encoder.router)

    async def _flush(self) -> None:
        """Write the unsent rows piece by piece; a broker that reads nothing gets at most two pieces."""
        while self._unsent:
            await self._channel.connection.ready()  # waits while the broker blocks publishing, or buffers would grow
            written = None
            async with self._writing:
                if self._is_closing:  # a frame after the library's answer to the close would end the connection
                    return
                payload = self._encode()
                self._sent_at.append((self._tag, self._clock()))
                self._undrained += len(payload)
                if self._undrained >= PIECE_BYTES:  # wait until the socket has taken them
                    written, self._undrained = self._loop.create_future(), 0
                await self._write_queue.put(ChannelFrame(payload, should_close=False, drain_future=written))
                del payload
            if written is not None:  # never set when the connection is lost
                await asyncio.wait([written, self._channel.closing], return_when=asyncio.FIRST_COMPLETED)
                # The library's writer keeps the last frame until the next one comes: send an empty one.
                await self._write_queue.put(ChannelFrame(b"", should_close=False))

    def _encode(self) -> bytes:
        """Return the frames of the next rows, and count these rows as in flight."""
        encoded = self._encoder.encode(self._unsent, self._redelivered)
        rows = [self._unsent.popleft() for _ in range(encoded.rows)]
        if self._redelivered:
            self._redelivered.difference_update(row.id for row in rows)
        if encoded.refused:
            for index, reason in encoded.refused.items():
                self._loop.call_soon(self._settle, Settled((rows[index],), Outcome.UNSENDABLE, not_sent(reason)))
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
        """Read confirms and returns, and pass all other frames on to the channel."""
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
        """Record how long this row took, for all rows confirmed since the last record."""
        sent_at = next((at for last, at in self._sent_at if last >= tag), None)
        if sent_at is not None:
            times.observe(self._clock() - sent_at, self._untimed)
        self._untimed = 0
        while self._sent_at and self._sent_at[0][0] < self._lowest:
            self._sent_at.popleft()

    def _read_return(self, frame: Any) -> None:
        """Read the header and the body frames that follow a return, and find the row by its outbox id.

        The library finds it by message_id, but two messages in flight may have the same one. The ack that the broker
        sends after the return then finds no row.
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


class Template(NamedTuple):
    """The parts that all messages of a kind share, and the layout of the parts that differ by row."""

    front: struct.Struct  # publish frame, then the header frame up to the outbox id and lane
    back: struct.Struct  # the rest of the header frame
    start: bytes
    header_size: int  # bytes of the header frame's payload, without the headers that differ by row
    properties: bytes
    table_size: int
    names: bytes
    lane: bytes
    delivery: bytes
    end: bytes
    is_event: bool  # the route makes CloudEvents of these rows


class Encoded(NamedTuple):
    """The frames of the first rows of a sequence."""

    frames: bytes
    rows: int  # the number of these rows, with the refused ones
    refused: dict[int, str]  # index of a row that cannot be a message -> why; an exception would keep the row in memory


class Encoder:
    """Encode messages for one channel.

    Args:
        channel: the channel's number.
        frame_max: the connection's negotiated frame size in bytes, 0 for no limit; larger bodies are split.
    Attributes:
        max_body: bytes that fit into a frame.
    """

    def __init__(self, channel: int, frame_max: int, router: Router, identity: MessageIdentity) -> None:
        self.channel = channel
        self._frame_max = frame_max or UNLIMITED
        self.max_body = self._frame_max - FRAME_OVERHEAD
        self.router = router
        self.identity = identity
        self._templates: dict[Kind, Template] = {}

    def encode(self, rows: Iterable[Row], redelivered: Container[int]) -> Encoded:
        """Return the frames of the first rows, in order: as many rows as one write should have.

        A message whose id is in `redelivered` gets a header that says so.
        """
        parts: list[Part] = []
        refused: dict[int, str] = {}
        count = size = 0
        for row in rows:
            try:
                self._append(row, parts, redelivered=row.id in redelivered)
            except ENCODING_ERRORS as error:
                refused[count] = str(error)
            size += row.size
            count += 1
            if size >= PIECE_BYTES:
                break
        return Encoded(b"".join(parts), count, refused)

    def _append(self, row: Row, parts: list[Part], *, redelivered: bool) -> None:
        """Append the frames of one message to `parts`.

        Raises:
            ENCODING_ERRORS: the row cannot be a message; `parts` is unchanged.
        """
        (
            lane, id_, message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, declared_type,
            headers, traceparent, _, payload, payload_bytes, created_at, _, _, excess, _, _, _,
            written_as,
        ) = row  # fmt: skip
        varies_by_key = aggregate_id if self.router.uses_aggregate_id else None
        kind = (
            aggregate_type, event_type, exchange, routing_key, declared_type, payload is None, written_as,
            varies_by_key,
        )  # fmt: skip
        template = self._templates.get(kind)
        if template is None:
            if len(self._templates) >= TEMPLATES_KEPT:
                self._templates.clear()
            template = self._templates[kind] = self.template(row)
        body = payload if payload is not None else payload_bytes or b""
        size = len(body)
        if excess is not None or size > self.identity.max_message_bytes:
            check_row(row, self.identity)
        if len(message_id) != MESSAGE_ID_BYTES:
            self.refuse_message_id(row)
        own = b"" if aggregate_id is None else KEY_ENTRY + len(aggregate_id).to_bytes(4, "big") + aggregate_id
        if template.is_event:
            body, further = self.event(row, redelivered=redelivered)
            size, own = len(body), own + further
        elif headers is not None or traceparent is not None or redelivered:
            own += self.further(row, redelivered=redelivered)
        if template.header_size + len(own) > self.max_body:
            self.check_header(template.header_size + len(own))
        seconds = created_at // 1_000_000 + POSTGRES_EPOCH
        if not 0 <= seconds <= LAST_SECOND:
            seconds = unix_time(row)
        parts += (
            template.front.pack(
                template.start, template.header_size + len(own), BASIC_CONTENT, size, FLAGS,
                template.properties, template.table_size + len(own), template.names, id_, template.lane, lane,
            ),
            own,
            template.back.pack(template.delivery, message_id, seconds, template.end),
        )  # fmt: skip
        if 0 < size <= self.max_body:
            parts += (BODY_START.pack(BODY, self.channel, size), body, END)
        elif size:
            self._split(body, parts)

    def _split(self, body: bytes, parts: list[Part]) -> None:
        """Append a body of more than one frame."""
        whole = memoryview(body)  # a slice of it is no copy
        for start in range(0, len(body), self.max_body):
            chunk = whole[start : start + self.max_body]
            parts += (BODY_START.pack(BODY, self.channel, len(chunk)), chunk, END)

    def further(self, row: Row, *, redelivered: bool) -> bytes:
        """Return the table entries that not every message has."""
        return _table(extra_headers(row, self.identity, redelivered=redelivered))

    def event(self, row: Row, *, redelivered: bool) -> tuple[bytes, bytes]:
        """Return the body of a row whose route makes CloudEvents, and the table entries that not every message has.

        Raises:
            UnsendableError: the row cannot be a CloudEvent.
        """
        headers = cloudevents.own_headers(extra_headers(row, self.identity, redelivered=redelivered))
        found = cloudevents.attributes(row, self.identity.events_source, headers.get(VERSION))
        further = _table(headers) if headers else b""
        if self.router.cloudevents(row) is CloudEvents.STRUCTURED:
            return cloudevents.envelope(row, found, self.identity), further + WRAPPED_ENTRY
        return row.body, further + _texts(self.identity.events_prefix, found)

    def refuse_message_id(self, row: Row) -> NoReturn:
        raise UnsendableError(f"a message_id has {MESSAGE_ID_BYTES} bytes, not {row.message_id!r}")

    def check_header(self, size: int) -> None:
        """Raise UnsendableError when a header of `size` bytes does not fit into a frame."""
        check_header_frame(size + FRAME_OVERHEAD, self._frame_max)

    def template(self, row: Row) -> Template:
        """Return what all messages of the row's kind share.

        Raises:
            UnsendableError: no message of the kind can be sent.
        """
        address = self.router.allowed_address(row)
        start = publish_frame(self.channel, address, flags=MANDATORY) + struct.pack(">BH", HEADER, self.channel)
        form = self.router.cloudevents(row)
        if form is not CloudEvents.OFF:
            cloudevents.check_kind(row)
        body_type = cloudevents.ENVELOPE if form is CloudEvents.STRUCTURED else content_type(row)
        properties = _short(body_type, "content type")
        stamp = _table(dict(self.identity.stamp))
        writer = WRITER_ENTRY + _long(row.written_as) if row.written_as else b""
        names = stamp + writer + b"\x10x-aggregate-typeS" + _long(row.aggregate_type) + b"\x0bx-outbox-idl"
        lane = b"\x0dx-outbox-lanes"
        delivery = bytes((PERSISTENT, MESSAGE_ID_BYTES))
        end = _short(row.event_type, "event type") + _short(self.identity.app_id, "app id")
        table_size = len(names) + 8 + len(lane) + 2
        header_size = 14 + len(properties) + 4 + table_size + len(delivery) + MESSAGE_ID_BYTES + 8 + len(end)
        end += END
        return Template(
            front=struct.Struct(f">{len(start)}sIIQH{len(properties)}sI{len(names)}sq{len(lane)}sh"),
            back=struct.Struct(f">{len(delivery)}s{MESSAGE_ID_BYTES}sQ{len(end)}s"),
            start=start,
            header_size=header_size,
            properties=properties,
            table_size=table_size,
            names=names,
            lane=lane,
            delivery=delivery,
            end=end,
            is_event=form is not CloudEvents.OFF,
        )


def publish_frame(channel: int, address: Address, *, flags: int = 0) -> bytes:
    """Return the first frame of a message for this address.

    It is not made by the library, which refuses some names that brokers allow.

    Raises:
        UnsendableError: a name is too long.
    """
    method = (
        struct.pack(">HHH", BASIC, PUBLISH, 0)
        + _short(address.exchange, "exchange")
        + _short(address.routing_key, "routing key")
        + bytes((flags,))
    )
    return FRAME_START.pack(METHOD, channel, len(method)) + method + END


def _short(value: bytes, name: str) -> bytes:
    if len(value) > 255:
        raise UnsendableError(f"{name} of {len(value)} bytes is longer than an AMQP short string (255)")
    return bytes((len(value),)) + value


def _long(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def _texts(prefix: str, texts: dict[str, str]) -> bytes:
    """Encode headers that are all texts as table entries; `prefix` begins each name."""
    return b"".join(
        _short((prefix + name).encode(), "header") + b"S" + _long(text.encode()) for name, text in texts.items()
    )


def _table(headers: dict[str, Any]) -> bytes:
    """Encode headers as table entries, without the table's own length."""
    try:
        return encode_table(headers)[4:]
    except ENCODING_ERRORS as error:
        raise UnsendableError(f"header {error}") from error
