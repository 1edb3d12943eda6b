"""Turn an event into the row that is written, or raise the error that says why it cannot be."""

import json
from datetime import datetime
from typing import Any, NamedTuple, NoReturn
from uuid import UUID

import orjson

from relay.outbox.declared import Declared, UnfitPayloadError, event_of
from relay.outbox.errors import FieldError, PayloadError, PayloadTooLargeError
from relay.outbox.events import Event, JsonModel
from relay.outbox.headers import headers_text
from relay.outbox.paths import path_of_lost_number, path_of_unwritable

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024  # the default of relay.max_message_bytes: the relay sends no larger one
MAX_TEXT_BYTES = 255  # the limit of AMQP's short string, and of the table's checks
MAYBE_LOST = "null"  # orjson and pydantic write NaN and infinities so; to look for them costs more than the dump
REMEDY = "make it text, a number or a list, or declare the event, and pydantic does so (`relay.outbox.event`)"
OTHER_BYTES = "other bytes need a content_type, as application/octet-stream"


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


def row_of(event: Event | Declared, trace_context: str | None, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> NewRow:
    """Return the row of an event.

    Raises:
        EventError: the table would refuse the row, or the relay could never send it.
        TypeError: the argument is no Event, and its class is not declared.
    """
    if not isinstance(event, Event):
        event = event_of(event)
    _check_text(event, "aggregate_type", event.aggregate_type)
    aggregate_id = key_text(event.aggregate_id)
    if aggregate_id is not None:
        _check_text(event, "aggregate_id", aggregate_id)
    _check_text(event, "event_type", event.event_type)
    if event.exchange is not None:
        _check_text(event, "exchange", event.exchange, may_be_empty=True)  # '' is the default exchange
    if event.routing_key is None:
        _check_default_routing_key(event)
    else:
        _check_text(event, "routing_key", event.routing_key, may_be_empty=True)
    if event.content_type is not None:
        _check_text(event, "content_type", event.content_type)
    if not isinstance(event.message_id, UUID):
        raise FieldError(event, "message_id", f"is of type {_kind(event.message_id)}; it takes a UUID")
    _check_available_at(event)
    text, data = _payload(event)
    size = len(data) if data is not None else len(text.encode()) if text is not None else 0
    if size > max_payload_bytes:
        raise PayloadTooLargeError(event, size, max_payload_bytes)
    # By position, which is faster: in the order of the fields.
    return NewRow(
        event.message_id,
        event.aggregate_type,
        aggregate_id,
        event.event_type,
        event.exchange,
        event.routing_key,
        headers_text(event),
        event.content_type,
        text,
        data,
        event.available_at,
        trace_context,
    )


def key_text(given: str | int | UUID | None) -> str | None:
    """Return an id as the table has it; what is no id is returned as it is, for the check."""
    if isinstance(given, str) or given is None:
        return given
    if isinstance(given, UUID):
        return str(given)
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return str(int(given)) if is_number else given  # type: ignore[return-value]  # `int`: also of an Enum


def _check_text(event: Event, field: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        takes = "a str, an int or a UUID" if field == "aggregate_id" else "a str"
        raise FieldError(event, field, f"is of type {_kind(value)}; it takes {takes}")
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
    # As DEFAULT_ROUTING_KEY of relay/engine/send/routes.py.
    size = len(f"{event.aggregate_type}.{event.event_type}".encode())
    if size > MAX_TEXT_BYTES:
        raise FieldError(
            event,
            "routing_key",
            f"would be <aggregate_type>.<event_type>, which has {size} bytes of UTF-8; the limit is {MAX_TEXT_BYTES}:"
            " give the event a shorter one",
        )


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
        case dict() | list():
            return _dumped(event, payload)
        case str():
            return _checked(event, payload)
        case bytes():
            try:
                return _checked(event, payload.decode())
            except UnicodeDecodeError as error:
                raise _not_json(event, f"byte {error.start} is not UTF-8") from None
        case _ if callable(getattr(payload, "model_dump_json", None)):
            return _dumped_model(event, payload)
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
        text = orjson.dumps(payload).decode()
    except orjson.JSONEncodeError as error:
        path, found = path_of_unwritable(payload, "payload", orjson.dumps) or ("payload", payload)
        problem = f"cannot be written as JSON: {error}"
        if "not JSON serializable" in problem:
            problem = f"is of type {_kind(found)}, which JSON does not have: {REMEDY}"
        raise PayloadError(event, problem, path) from None
    if MAYBE_LOST in text:
        _check_numbers(event, payload)
    return text


def _dumped_model(event: Event, payload: JsonModel) -> str:
    try:
        text = str(payload.model_dump_json())
    except UnfitPayloadError as error:
        raise PayloadError(event, str(error), error.path) from None
    except ValueError as error:  # as pydantic's
        raise PayloadError(event, f"cannot be written as JSON: {error}") from error
    if "NaN" in text or "Infinity" in text:  # as text, or as what is no JSON: the model's `ser_json_inf_nan` says
        return _checked(event, text)
    if MAYBE_LOST in text:
        _check_numbers(event, payload.model_dump() if hasattr(payload, "model_dump") else payload)
    return text


def _check_numbers(event: Event, dumped: object) -> None:
    """Raise the error if a number of what was dumped became null."""
    if path := path_of_lost_number(dumped, "payload"):
        raise PayloadError(event, "cannot be written as JSON: it is NaN or an infinity", path)


def _not_json(event: Event, why: str) -> PayloadError:
    return PayloadError(event, f"is not JSON ({why}); {OTHER_BYTES}")


def _kind(value: object) -> str:
    return type(value).__name__
