"""A dead letter as JSON, whole: for a file, and for who reads it."""

import base64
from dataclasses import asdict
from datetime import datetime
from decimal import Decimal
from typing import Any

import orjson

from relay.consume.failed.envelope import pack
from relay.operate.letters.letter import Held

LINE_BREAKS = (b"\n", b"\r")


def document(held: Held) -> dict[str, Any]:
    """Return everything of a letter.

    `headers` and `properties` are for people; `envelope` has them with their types, as AMQP writes them (base64).
    `body` is the body itself where that is JSON on one line, byte for byte; else `body_base64` is there.
    """
    properties = held.delivered.header.properties
    return {
        **asdict(held.letter),
        "properties": {
            "type" if name == "message_type" else name: _plain(value)
            for name, value in properties
            if value is not None and name not in ("headers", "cluster_id")
        },
        "headers": _plain(properties.headers or {}),
        "envelope": _base64(pack(held.delivered)),
        **_body(held.delivered.body),
    }


def json_of(body: bytes) -> object | None:
    """Return what the body says when it is JSON; None when it is not, or says null."""
    try:
        return orjson.loads(body)  # type: ignore[no-any-return]
    except orjson.JSONDecodeError:
        return None


def _body(body: bytes) -> dict[str, Any]:
    is_one_line = not any(each in body for each in LINE_BREAKS)
    if is_one_line and json_of(body) is not None:
        return {"body": orjson.Fragment(body)}
    return {"body_base64": _base64(body)}


def _plain(value: Any) -> Any:
    """Return a value of an AMQP table in JSON's types."""
    match value:
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case bytes() | bytearray():
            return _base64(value)
        case datetime():
            return value.isoformat()
        case Decimal():
            return str(value)
        case _:
            return value


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()
