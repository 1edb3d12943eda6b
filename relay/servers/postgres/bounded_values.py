"""Values that PostgreSQL keeps and Python does not know, as the nearest that it knows.

The driver refuses a whole answer for one such value, which any writer can write. An operator would see nothing then.
"""

import json
from datetime import UTC, date, datetime
from typing import Any

import psycopg
from psycopg.abc import Buffer, Loader
from psycopg.types.datetime import DateBinaryLoader, DateLoader, TimestamptzBinaryLoader, TimestamptzLoader
from psycopg.types.json import JsonbLoader, JsonLoader

# Two days from the ends of what Python can express: any time zone can show them.
FIRST, LAST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)

DEEPEST = 100  # levels of JSON; pydantic writes 255, and Python reads under 1,000
LARGEST = 2**63  # of JSON's whole numbers, which it does not bound
NOT_SHOWN = "not shown"


def bound_values(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
    """Read infinite moments, and years that Python does not know, as the first or the last that it knows.

    JSON that is nested too deeply is read as an object that says so. A whole number that is too large is a float.
    """
    for kind, loader in LOADERS:
        connection.adapters.register_loader(kind, loader)


class _Moment(TimestamptzLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            return FIRST if _is_early(data) else LAST


class _BinaryMoment(TimestamptzBinaryLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            return FIRST if _is_negative(data) else LAST


class _Day(DateLoader):
    def load(self, data: Buffer) -> date:
        try:
            return super().load(data)
        except psycopg.DataError:
            return (FIRST if _is_early(data) else LAST).date()


class _BinaryDay(DateBinaryLoader):
    def load(self, data: Buffer) -> date:
        try:
            return super().load(data)
        except psycopg.DataError:
            return (FIRST if _is_negative(data) else LAST).date()


class _Json(JsonLoader):
    def load(self, data: Buffer) -> Any:
        return _read_json(bytes(data))


class _Jsonb(JsonbLoader):
    def load(self, data: Buffer) -> Any:
        return _read_json(bytes(data))


def _read_json(document: bytes) -> Any:
    try:
        value = json.loads(document, parse_int=_whole)
    except RecursionError:
        return {NOT_SHOWN: f"it is nested more than {DEEPEST} levels deep"}
    # Most documents have fewer brackets than that, and need no look at their levels.
    if document.count(b"{") + document.count(b"[") > DEEPEST and _is_deep(value):
        return {NOT_SHOWN: f"it is nested more than {DEEPEST} levels deep"}
    return value


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 and -LARGEST <= int(digits) < LARGEST else float(digits)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inside for each in values]
    return bool(level)


def _is_early(data: Buffer) -> bool:
    return bytes(data) == b"-infinity" or bytes(data).endswith(b"BC")


def _is_negative(data: Buffer) -> bool:
    return bool(bytes(data)[0] & 0x80)  # a signed number, counted from 2000


LOADERS: list[tuple[str, type[Loader]]] = [
    ("timestamptz", _Moment),
    ("timestamptz", _BinaryMoment),
    ("date", _Day),
    ("date", _BinaryDay),
    ("json", _Json),
    ("jsonb", _Jsonb),
]
