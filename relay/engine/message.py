"""What a row is as an AMQP message: its address, properties and headers, before any encoding."""

import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from pamqp.commands import Basic

from relay.engine.row import Row

POSTGRES_EPOCH = 946_684_800  # 2000-01-01 as a Unix time
JSON = b"application/json"
BYTES = b"application/octet-stream"
PERSISTENT = 2
HEADER_NAME_BYTES = 128  # the library would cut a longer one silently
REDELIVERED = "x-outbox-redelivered"
REPLAY_ID, REPLAYED_AT = "x-replay-id", "x-replayed-at"  # by stamp, or of rows that spark/jobs/replay.py has written
OURS = frozenset({"x-outbox-id", "x-outbox-lane", "x-aggregate-type", "x-aggregate-id", REDELIVERED})

LAST_SECOND = 2**32 - 1  # in the year 2106; the library's decoder takes what is above for milliseconds


class UnsendableError(ValueError):
    """The row cannot become a message; the reason is for the operator."""


# What encoding a row may raise: jsonb takes numbers and depths that neither JSON parsers nor AMQP tables have.
ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, struct.error)


class Identity(NamedTuple):
    """What the relay says of itself on each message."""

    app_id: bytes
    max_message_bytes: int
    stamp: Mapping[str, str | int] = MappingProxyType({})  # headers that all messages of a connection get


def too_large(size: int, identity: Identity) -> str:
    return f"{size} bytes are more than max_message_bytes ({identity.max_message_bytes})"


def unix_time(row: Row) -> int:
    """When the row was written, in whole seconds: AMQP timestamps have no finer unit, and begin in 1970."""
    return min(max(0, row.created_at // 1_000_000 + POSTGRES_EPOCH), LAST_SECOND)


def content_type(row: Row) -> bytes:
    return row.content_type or (JSON if row.payload is not None else BYTES)


def extra_headers(row: Row, identity: Identity, *, redelivered: bool) -> dict[str, Any]:
    """Give the headers beyond those that every message has; the names that are ours or stamped cannot be overridden.

    Raises:
        UnsendableError: a name is too long for an AMQP table, or a value is JSON to PostgreSQL alone.
    """
    headers: dict[str, Any] = {}
    if row.headers is not None:
        ours = OURS | identity.stamp.keys()
        headers.update((name, value) for name, value in _read(row.headers).items() if name not in ours)
    if row.trace_context is not None:
        headers.update(_read(row.trace_context))
    if redelivered:
        headers[REDELIVERED] = True
    _check_names(headers)
    return headers


def _read(headers: bytes) -> dict[str, Any]:
    try:
        read: dict[str, Any] = orjson.loads(headers)
    except ValueError as error:
        raise UnsendableError(f"headers: {error}") from error
    return read


def _check_names(value: object) -> None:
    if isinstance(value, list):
        for item in value:
            _check_names(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if len(name.encode()) > HEADER_NAME_BYTES:
                raise UnsendableError(f"header name {name[:40]!r}... is longer than {HEADER_NAME_BYTES} bytes")
            _check_names(item)


def properties(row: Row, identity: Identity, *, redelivered: bool) -> Basic.Properties:
    """Give the properties as the library's own type: the reference for `frames`, and all that `publish` sends."""
    headers: dict[str, Any] = {"x-aggregate-type": row.aggregate_type.decode()}
    if row.aggregate_id is not None:
        headers["x-aggregate-id"] = row.aggregate_id.decode()
    headers |= {"x-outbox-id": row.id, "x-outbox-lane": row.lane, **identity.stamp}
    headers |= extra_headers(row, identity, redelivered=redelivered)
    return Basic.Properties(
        content_type=content_type(row).decode(),
        headers=headers,
        delivery_mode=PERSISTENT,
        message_id=row.message_id.decode(),
        timestamp=datetime.fromtimestamp(unix_time(row), tz=UTC),
        message_type=row.event_type.decode(),
        app_id=identity.app_id.decode(),
    )
