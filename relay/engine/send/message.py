"""A row as an AMQP message: its properties and headers, before any encoding."""

import re
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import orjson

from relay.config.settings import Settings
from relay.engine.row import MAX_TRACESTATE, Row
from relay.outbox.headers import MAX_HEADER_DEPTH, MAX_HEADER_NAME_BYTES

POSTGRES_EPOCH = 946_684_800  # 2000-01-01 as a Unix time
JSON = b"application/json"
BYTES = b"application/octet-stream"
PERSISTENT = 2
REDELIVERED = "x-outbox-redelivered"
REPLAY_ID, REPLAYED_AT = "x-replay-id", "x-replayed-at"  # from the stamp, or from rows of `outbox-spark replay`
# RabbitMQ reads further routing keys from these. Its queues keep CC as x-cc, and route by it when they dead-letter.
SENDER_SELECTED = ("CC", "BCC", "x-cc")
LINK = "x-link-traceparent"  # of a replay, in place of traceparent: for a span link
WRITER = "x-outbox-writer"  # the role that wrote the row, as PostgreSQL noted it
WRAPPED = "x-outbox-cloudevents"  # on a message whose body is a CloudEvents envelope of the relay
OURS = frozenset({"x-outbox-id", "x-outbox-lane", "x-aggregate-type", "x-aggregate-id", WRITER, WRAPPED, REDELIVERED})
# A consumer or the broker writes these: from a row they would be believed.
OF_OTHERS = frozenset({
    "x-folded-header", "x-partition", "x-partition-epoch", "x-retry-attempts", "x-dead-reason", "x-dead-attempts",
    "x-death", "x-delivery-count", "x-acquired-count", "x-original-exchange", "x-original-routing-key",
})  # fmt: skip

# W3C Trace Context. The relay leaves out a value of another form, and sends the message without it.
TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_KEY = rb"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = rb"[ \t]*(?:" + _KEY + rb"=[ -+\--<>-~]{0,255}[!-+\--<>-~])?[ \t]*"
TRACESTATE = re.compile(_MEMBER + rb"(?:," + _MEMBER + rb"){0,31}")

LAST_SECOND = 2**32 - 1  # in the year 2106; the library's decoder reads larger numbers as milliseconds


class UnsendableError(ValueError):
    """The row cannot become a message; the reason is for the operator."""


# What encoding a row may raise: jsonb allows numbers and depths that JSON parsers and AMQP tables do not.
ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, struct.error)


class MessageIdentity(NamedTuple):
    """What the relay writes on each message about itself, and the limits that its messages have."""

    app_id: bytes
    max_message_bytes: int
    stamp: Mapping[str, str | int] = MappingProxyType({})  # headers that all messages of a connection get
    sender_selected: bool = False  # whether a row's headers may name further routing keys
    events_source: str = "/"  # of CloudEvents
    events_prefix: str = "ce-"  # of the headers of a binary CloudEvent

    @classmethod
    def of(cls, settings: Settings, stamp: Mapping[str, str | int] | None = None) -> Self:
        broker = settings.broker
        return cls(
            broker.app_id.encode(),
            settings.relay.max_message_bytes,
            stamp or {},
            sender_selected=broker.sender_selected_distribution,
            events_source=broker.cloudevents_source or "/" + quote(broker.app_id, safe=""),
            events_prefix=broker.cloudevents_prefix,
        )


def not_sent(reason: str) -> str:
    """Return the reason for parking a row that the relay could not send."""
    return f"not sent by the relay: {reason}"


def check_row(row: Row, identity: MessageIdentity) -> None:
    """Raise UnsendableError when the row was not read completely, or its body is too large."""
    if row.excess is not None:
        raise UnsendableError(row.excess.decode())
    if (size := len(row.body)) > identity.max_message_bytes:
        raise UnsendableError(f"{size} bytes are more than max_message_bytes ({identity.max_message_bytes})")


def check_header_frame(size: int, frame_max: int) -> None:
    """Raise UnsendableError when the header frame has more bytes than the connection allows.

    A header frame cannot be split, and the broker would close the connection.
    """
    if 0 < frame_max < size:
        raise UnsendableError(
            f"headers and properties need a frame of {size} bytes; the broker takes {frame_max} (frame_max)"
        )


def unix_time(row: Row) -> int:
    """Return when the row was written, as an AMQP timestamp: in whole seconds, and not before 1970."""
    return min(max(0, row.created_at // 1_000_000 + POSTGRES_EPOCH), LAST_SECOND)


def content_type(row: Row) -> bytes:
    return row.content_type or (JSON if row.payload is not None else BYTES)


def extra_headers(row: Row, identity: MessageIdentity, *, redelivered: bool) -> dict[str, Any]:
    """Return the headers beyond those that every message has. A row cannot override the relay's or stamped headers.

    Raises:
        UnsendableError: a name is too long for an AMQP table, only PostgreSQL can read a value as JSON, or a
            forbidden header names routing keys.
    """
    headers: dict[str, Any] = {}
    if row.headers is not None:
        ours = OURS | OF_OTHERS | identity.stamp.keys()
        headers.update((name, value) for name, value in _read(row.headers).items() if name not in ours)
        _check(headers)
        _check_sender_selected(headers, identity)
    headers.update(trace_headers(row))
    if redelivered:
        headers[REDELIVERED] = True
    return headers


def trace_headers(row: Row) -> tuple[tuple[str, str], ...]:
    """Return the headers by which a consumer continues the row's trace; empty when they are not in W3C's form."""
    if row.traceparent is None or not TRACEPARENT.fullmatch(row.traceparent):
        return ()
    parent = ("traceparent", row.traceparent.decode())
    state = row.tracestate
    if state is None or len(state) > MAX_TRACESTATE or not TRACESTATE.fullmatch(state):
        return (parent,)
    return (parent, ("tracestate", state.decode()))


def _read(headers: bytes) -> dict[str, Any]:
    try:
        read: dict[str, Any] = orjson.loads(headers)
    except ValueError as error:
        raise UnsendableError(f"headers: {error}") from error
    return read


def _check(value: object, depth: int = 0) -> None:
    if depth > MAX_HEADER_DEPTH:
        raise UnsendableError(f"headers are nested in more than {MAX_HEADER_DEPTH} levels")
    if isinstance(value, list):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            if len(name.encode()) > MAX_HEADER_NAME_BYTES:  # the library would cut it silently
                raise UnsendableError(f"header name {name[:40]!r}... is longer than {MAX_HEADER_NAME_BYTES} bytes")
            _check(item, depth + 1)


def _check_sender_selected(headers: Mapping[str, Any], identity: MessageIdentity) -> None:
    for name in SENDER_SELECTED:
        if name not in headers:
            continue
        if not identity.sender_selected:
            raise UnsendableError(f"header {name} names routing keys, and broker.sender_selected_distribution is false")
        keys = headers[name]
        if not isinstance(keys, list) or not all(isinstance(key, str) and len(key.encode()) <= 255 for key in keys):
            raise UnsendableError(f"header {name} is not a list of routing keys of at most 255 bytes")
