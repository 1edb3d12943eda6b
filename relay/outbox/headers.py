"""Check headers: they must fit both jsonb, in which they wait, and an AMQP table, in which they are sent."""

from collections.abc import Mapping
from math import isfinite

import orjson

from relay.outbox.errors import HeaderError
from relay.outbox.events import Event

MAX_HEADER_NAME_BYTES = 128  # AMQP 0-9-1, 4.2.5.5; client libraries cut off longer names
# All properties are sent in one frame, which cannot be split: 131,072 bytes with RabbitMQ's default frame_max.
MAX_HEADERS_BYTES = 64 * 1024
MAX_HEADER_DEPTH = 64  # consumers' libraries read tables recursively
INTEGERS = range(-(2**63), 2**63)


def headers_text(event: Event) -> str | None:
    """Return the headers as JSON text.

    Raises:
        HeaderError: AMQP cannot carry one of them, or would change its value or type.
    """
    if event.headers is None:
        return None
    if not isinstance(event.headers, Mapping):
        raise HeaderError(event, "headers", f"is of type {type(event.headers).__name__}; it takes a dict")
    _check(event, "headers", dict(event.headers), 0)
    data = orjson.dumps(dict(event.headers))
    if len(data) > MAX_HEADERS_BYTES:
        raise HeaderError(event, "headers", f"has {len(data)} bytes as JSON; the limit is {MAX_HEADERS_BYTES}")
    return data.decode()


def _check(event: Event, path: str, value: object, depth: int) -> None:
    if depth > MAX_HEADER_DEPTH:
        raise HeaderError(event, "headers", f"is nested too deeply; the limit is {MAX_HEADER_DEPTH} levels")
    match value:
        case None | bool():
            pass
        case str():
            _check_text(event, path, value)
        case int():
            if value not in INTEGERS:
                raise HeaderError(event, path, "does not fit into 64 bits")
        case float():
            # jsonb writes 1e19 as 10000000000000000000. That is read back as an integer for which AMQP has no type.
            if not isfinite(value) or abs(value) >= 2**63:
                raise HeaderError(event, path, f"is {value}; AMQP and jsonb take finite numbers below 2^63")
        case list():
            for position, item in enumerate(value):
                _check(event, f"{path}[{position}]", item, depth + 1)
        case dict():
            for name, item in value.items():
                _check_name(event, path, name)
                _check(event, f"{path}.{name}", item, depth + 1)
        case _:
            raise HeaderError(
                event,
                path,
                f"is of type {type(value).__name__}; AMQP through JSON takes text, numbers, bool, None, lists, dicts",
            )


def _check_name(event: Event, path: str, name: object) -> None:
    if not isinstance(name, str):
        raise HeaderError(event, f"{path}.{name!r}", f"has a name of type {type(name).__name__}; it takes a str")
    _check_text(event, f"{path}.{name}", name)
    if (size := len(name.encode())) > MAX_HEADER_NAME_BYTES:
        raise HeaderError(
            event, f"{path}.{name[:20]}...", f"has a name of {size} bytes; the limit is {MAX_HEADER_NAME_BYTES}"
        )


def _check_text(event: Event, path: str, text: str) -> None:
    if "\0" in text:
        raise HeaderError(event, path.replace("\0", "?"), "holds a NUL character, which jsonb cannot store")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HeaderError(event, ascii(path), "holds half a surrogate pair, which UTF-8 cannot encode") from None
