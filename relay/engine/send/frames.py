"""Encode rows into AMQP 0-9-1 frames, many into one buffer.

The library encodes one message at a time, at 20 us or more. Here what is the same for all messages of a kind is
encoded once and kept as a template, and a row costs two struct packs: about 1 us.
This is the pure codec; `compiled_frames.pyx` writes the same bytes without an object a field. `codec` chooses one.
Layout: AMQP 0-9-1 specification, sections 2.3.5 and 4.2. tests/engine/test_frames.py decodes what both write with the
library, and compares it with `message.properties`.
"""

import struct
from collections.abc import Container, Iterable
from typing import Any, NamedTuple, NoReturn

from relay.broker.content_header import encode_table
from relay.engine.row import Row
from relay.engine.send.message import (
    ENCODING_ERRORS,
    LAST_SECOND,
    PERSISTENT,
    POSTGRES_EPOCH,
    Identity,
    UnsendableError,
    check_header_frame,
    check_row,
    content_type,
    extra_headers,
    unix_time,
)
from relay.engine.send.routes import Address, Router

METHOD, HEADER, BODY, END = 1, 2, 3, b"\xce"
FRAME_START = BODY_START = struct.Struct(">BHI")  # type, channel, size
BASIC, PUBLISH, MANDATORY = 60, 40, 1
BASIC_CONTENT = BASIC << 16  # class and weight, the first fields of a content header
KEY_ENTRY = b"\x0ex-aggregate-idS"
# content-type, headers, delivery-mode, message-id, timestamp, type, app-id
FLAGS = 1 << 15 | 1 << 13 | 1 << 12 | 1 << 7 | 1 << 6 | 1 << 5 | 1 << 3
FRAME_OVERHEAD = 8  # type, channel, size and end mark
UNLIMITED = 128 * 1024  # bytes of a frame where the broker sets no limit: its own default
TEMPLATES_KEPT = 4096  # an address that differs by row must not grow the memory
PIECE_BYTES = 1024 * 1024  # of frames that are written at once: the library's writer holds them, beside their rows
MESSAGE_ID_BYTES = 36

Part = bytes | memoryview
Kind = tuple[bytes, bytes, bytes | None, bytes | None, bytes | None, bool, bytes | None]


class Template(NamedTuple):
    """What all messages of a kind share, laid around what differs by row."""

    front: struct.Struct  # publish frame, then the header frame up to the outbox id and lane
    back: struct.Struct  # the rest of the header frame
    start: bytes
    header_size: int  # of the header frame's payload, without the headers that differ by row
    properties: bytes
    table_size: int
    names: bytes
    lane: bytes
    delivery: bytes
    end: bytes


class Encoded(NamedTuple):
    """The frames of the first rows of many."""

    frames: bytes
    rows: int  # how many they are, with those that were refused
    refused: dict[int, Exception]  # which of them, counted from 0, cannot be a message, and why


class Encoder:
    """Encode messages for one channel.

    Args:
        channel: the channel's number.
        frame_max: the connection's negotiated frame size in bytes, 0 for no limit; larger bodies are split.
    Attributes:
        max_body: bytes that fit into a frame.
    """

    def __init__(self, channel: int, frame_max: int, router: Router, identity: Identity) -> None:
        self.channel = channel
        self._frame_max = frame_max or UNLIMITED
        self.max_body = self._frame_max - FRAME_OVERHEAD
        self.router = router
        self.identity = identity
        self._templates: dict[Kind, Template] = {}

    def encode(self, rows: Iterable[Row], redelivered: Container[int]) -> Encoded:
        """Return the frames of the first rows, in order, as many as one write should have.

        Messages of the ids in `redelivered` carry the header that says so.
        """
        parts: list[Part] = []
        refused: dict[int, Exception] = {}
        count = size = 0
        for row in rows:
            try:
                self._append(row, parts, redelivered=row.id in redelivered)
                size += row.size
            except ENCODING_ERRORS as error:
                refused[count] = error
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
            headers, traceparent, _, payload, payload_bytes, created_at, _, _, excess, _, _,
        ) = row  # fmt: skip
        varies_by_key = aggregate_id if self.router.uses_aggregate_id else None
        kind = (aggregate_type, event_type, exchange, routing_key, declared_type, payload is None, varies_by_key)
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
        if headers is not None or traceparent is not None or redelivered:
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
        """Return the table entries beyond those that every message has."""
        return _table(extra_headers(row, self.identity, redelivered=redelivered))

    def refuse_message_id(self, row: Row) -> NoReturn:
        raise UnsendableError(f"a message_id has {MESSAGE_ID_BYTES} bytes, not {row.message_id!r}")

    def check_header(self, size: int) -> None:
        """Raise UnsendableError when a header of so many bytes does not fit into a frame."""
        check_header_frame(size + FRAME_OVERHEAD, self._frame_max)

    def template(self, row: Row) -> Template:
        """Return what all messages of the row's kind share.

        Raises:
            UnsendableError: no message of the kind can be sent.
        """
        address = self.router.allowed_address(row)
        start = publish_frame(self.channel, address, flags=MANDATORY) + struct.pack(">BH", HEADER, self.channel)
        properties = _short(content_type(row), "content type")
        stamp = _table(dict(self.identity.stamp))
        names = stamp + b"\x10x-aggregate-typeS" + _long(row.aggregate_type) + b"\x0bx-outbox-idl"
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
        )


def publish_frame(channel: int, address: Address, *, flags: int = 0) -> bytes:
    """Return the first frame of a message for this address; the library refuses names that the broker knows.

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


def _table(headers: dict[str, Any]) -> bytes:
    """Encode headers as table entries, without the table's own length."""
    try:
        return encode_table(headers)[4:]
    except ENCODING_ERRORS as error:
        raise UnsendableError(f"header {error}") from error
