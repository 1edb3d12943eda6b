"""Read values that PostgreSQL stores but Python cannot represent as the nearest value that Python has.

The driver refuses a whole result because of one such value, which any writer can write. Then an operator would see no
row at all.
"""

import json
from datetime import UTC, date, datetime
from typing import Any

import psycopg
from psycopg.abc import Buffer, Loader
from psycopg.types.datetime import DateBinaryLoader, DateLoader, TimestamptzBinaryLoader, TimestamptzLoader
from psycopg.types.json import JsonbLoader, JsonLoader

# Two days inside the limits of Python's datetime, so that every time zone can show them.
FIRST, LAST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)

DEEPEST = 100  # levels of JSON; pydantic can write 255, and Python can read fewer than 1,000
LARGEST = 2**63  # limit of whole numbers; JSON itself has no limit
NOT_SHOWN = "not shown"


def bound_values(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
    """Let a connection read infinite moments, and years that Python does not have, as `FIRST` or `LAST`.

    JSON that is nested too deeply is read as an object that says so. A whole number that is too large becomes a float.
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
    # Most documents have fewer brackets than that, so their levels need not be counted.
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
    return bool(bytes(data)[0] & 0x80)  # the value is a signed number, counted from the year 2000


LOADERS: list[tuple[str, type[Loader]]] = [
    ("timestamptz", _Moment),
    ("timestamptz", _BinaryMoment),
    ("date", _Day),
    ("date", _BinaryDay),
    ("json", _Json),
    ("jsonb", _Jsonb),
]
