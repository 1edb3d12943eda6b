"""Turn an event into the row that is written, or raise the error that says why it cannot be."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import datetime
from math import isfinite
from reprlib import repr as shortened
from typing import Any, NamedTuple, NoReturn
from uuid import UUID

import orjson

from relay.outbox.errors import FieldError, PayloadError, PayloadTooLargeError
from relay.outbox.event import Event
from relay.outbox.headers import headers_text

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024  # the default of relay.max_message_bytes: the relay sends no larger one
MAX_TEXT_BYTES = 255  # the limit of AMQP's short string, and of the table's checks
OTHER_BYTES = "other bytes need a content_type, as application/octet-stream"
MAX_PATH_DEPTH = 256  # orjson's limit is 254; a payload that contains itself would have no end


class NewRow(NamedTuple):
    """One row: the columns of `outbox.message` that a writer fills, JSON as text."""

    message_id: UUID
    aggregate_type: str
    aggregate_id: str | None
    event_type: str
    exchange: str | None
    routing_key: str | None
    headers: str | None
    content_type: str | None
    payload: str | None
    payload_bytes: bytes | None
    available_at: datetime | None
    trace_context: str | None


def row_of(event: Event, trace_context: str | None, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> NewRow:
    """Return the row of an event.

    Raises:
        EventError: the table would refuse the row, or the relay could never send it.
        TypeError: the argument is no Event.
    """
    if not isinstance(event, Event):
        raise TypeError(_not_an_event(event))
    _check_text(event, "aggregate_type", event.aggregate_type)
    aggregate_id = key_text(event.aggregate_id)
    _check_text(event, "aggregate_id", aggregate_id, optional=True)
    _check_text(event, "event_type", event.event_type)
    _check_text(event, "exchange", event.exchange, optional=True, may_be_empty=True)  # '' is the default exchange
    _check_text(event, "routing_key", event.routing_key, optional=True, may_be_empty=True)
    _check_default_routing_key(event)
    _check_text(event, "content_type", event.content_type, optional=True)
    if not isinstance(event.message_id, UUID):
        raise FieldError(event, "message_id", f"is of type {_kind(event.message_id)}; it takes a UUID")
    _check_available_at(event)
    text, data = _payload(event)
    size = len(data) if data is not None else len(text.encode()) if text is not None else 0
    if size > max_payload_bytes:
        raise PayloadTooLargeError(event, size, max_payload_bytes)
    return NewRow(
        message_id=event.message_id,
        aggregate_type=event.aggregate_type,
        aggregate_id=aggregate_id,
        event_type=event.event_type,
        exchange=event.exchange,
        routing_key=event.routing_key,
        headers=headers_text(event),
        content_type=event.content_type,
        payload=text,
        payload_bytes=data,
        available_at=event.available_at,
        trace_context=trace_context,
    )


def key_text(given: str | int | UUID | None) -> str | None:
    """Return an id as the table has it; what is no id is returned as it is, for the check."""
    is_id = isinstance(given, int | UUID) and not isinstance(given, bool)
    return str(given) if is_id else given  # type: ignore[return-value]


def _check_text(event: Event, field: str, value: object, *, optional: bool = False, may_be_empty: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str):
        raise FieldError(event, field, f"is of type {_kind(value)}; it takes a str")
    if not value and not may_be_empty:
        raise FieldError(event, field, "is empty")
    if "\0" in value:
        raise FieldError(event, field, "holds a NUL character, which PostgreSQL cannot store")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise FieldError(event, field, "holds half a surrogate pair, which UTF-8 cannot encode") from None
    if size > MAX_TEXT_BYTES:
        raise FieldError(event, field, f"has {size} bytes of UTF-8; the limit is {MAX_TEXT_BYTES}")


def _check_default_routing_key(event: Event) -> None:
    if event.routing_key is not None:
        return
    # As DEFAULT_ROUTING_KEY of relay/engine/send/routes.py.
    size = len(f"{event.aggregate_type}.{event.event_type}".encode())
    if size > MAX_TEXT_BYTES:
        raise FieldError(
            event,
            "routing_key",
            f"would be <aggregate_type>.<event_type>, which has {size} bytes of UTF-8; the limit is {MAX_TEXT_BYTES}:"
            " give the event a shorter one",
        )


def _not_an_event(given: object) -> str:
    kind = f"{type(given).__module__}.{type(given).__qualname__}"
    match given:
        case type():
            return f"the class {given.__qualname__} is no event: make one, as in Event(aggregate_type, ...)"
        case dict():
            return "a dict is no event: make one of it, as in Event(**fields)"
        case list() | tuple() | set() | Iterator():
            return (
                f"a {type(given).__name__} is no event: write add(connection, *events) or add_many(connection, events)"
            )
        case _:
            return f"{kind} is no event: write add(connection, event), the connection first"


def _check_available_at(event: Event) -> None:
    if event.available_at is None:
        return
    if not isinstance(event.available_at, datetime):
        raise FieldError(event, "available_at", f"is of type {_kind(event.available_at)}; it takes a datetime")
    if event.available_at.utcoffset() is None:
        raise FieldError(event, "available_at", "has no time zone; give it one, as in datetime.now(UTC)")


def _payload(event: Event) -> tuple[str | None, bytes | None]:
    """Return the values of the columns `payload` and `payload_bytes`, of which one is `None`."""
    payload = event.payload
    if event.content_type is None or _is_json(event.content_type):
        return _json_text(event), None
    match payload:
        case bytes():
            return None, payload
        case str():
            try:
                return None, payload.encode()
            except UnicodeEncodeError:
                raise PayloadError(event, "holds half a surrogate pair, which UTF-8 cannot encode") from None
        case _:
            raise PayloadError(event, f"of type {_kind(payload)} becomes JSON, but content_type says otherwise")


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def _json_text(event: Event) -> str:
    payload = event.payload
    match payload:
        case str():
            return _checked(event, payload)
        case bytes():
            try:
                return _checked(event, payload.decode())
            except UnicodeDecodeError as error:
                raise _not_json(event, f"byte {error.start} is not UTF-8") from None
        case dict() | list():
            return _dumped(event, payload)
        case _ if callable(dump := getattr(payload, "model_dump_json", None)):
            try:
                return str(dump())
            except ValueError as error:  # as pydantic's
                raise PayloadError(event, f"cannot be written as JSON: {error}") from error
        case _:
            raise PayloadError(event, f"is of type {_kind(payload)}; it takes bytes, str, dict, list or a model")


def _checked(event: Event, text: str) -> str:
    """Return the text if PostgreSQL accepts it as JSON: only its grammar matters."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        # orjson also refuses numbers beyond a double, lone surrogate escapes and a depth of 1024, but PostgreSQL
        # stores them. So the standard library decides, without its conversions. Only a text that orjson refuses
        # costs this.
        try:
            json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
            text.encode()
        except RecursionError:
            raise PayloadError(event, "is nested too deeply") from None
        except ValueError as error:
            raise _not_json(event, str(error)) from None
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _dumped(event: Event, payload: dict[str, Any] | list[Any]) -> str:
    try:
        data = orjson.dumps(payload)
    except orjson.JSONEncodeError as error:
        path = _path_of_unwritable(payload, "payload", MAX_PATH_DEPTH)
        raise PayloadError(event, f"cannot be written as JSON: {error}", path or "payload") from None
    # orjson writes NaN and infinities as null. The search for them costs more than the dump, so it needs a null first.
    if b"null" in data and (path := _path_of_lost_number(payload, "payload")):
        raise PayloadError(event, "cannot be written as JSON: it is NaN or an infinity", path)
    return data.decode()


def _path_of_unwritable(value: object, path: str, depth: int) -> str | None:
    """Return the path of the innermost value that orjson refuses; None if the value is nested too deeply to find it."""
    if not depth:
        return None
    for inner_path, inner in _inner(value, path):
        try:
            orjson.dumps(inner)
        except orjson.JSONEncodeError:
            return _path_of_unwritable(inner, inner_path, depth - 1)
    return path


def _path_of_lost_number(value: object, path: str) -> str | None:
    if isinstance(value, float):
        return None if isfinite(value) else path
    found = (_path_of_lost_number(inner, inner_path) for inner_path, inner in _inner(value, path))
    return next(filter(None, found), None)


def _inner(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the values that orjson writes inside a value, each with its path."""
    match value:
        case dict():
            yield from ((f"{path}.{_name(name)}", inner) for name, inner in value.items())
        case list() | tuple():
            yield from ((f"{path}[{position}]", inner) for position, inner in enumerate(value))
        case _ if is_dataclass(value):
            yield from ((f"{path}.{each.name}", getattr(value, each.name)) for each in fields(value))


def _name(key: object) -> str:
    return key if isinstance(key, str) and key.isidentifier() else shortened(key)


def _not_json(event: Event, why: str) -> PayloadError:
    return PayloadError(event, f"is not JSON ({why}); {OTHER_BYTES}")


def _kind(value: object) -> str:
    return type(value).__name__
