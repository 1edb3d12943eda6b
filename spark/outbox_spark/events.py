"""Events that a Python function makes of rows, on the executors and a batch of Arrow at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

from outbox_spark.errors import RowError
from outbox_spark.plan import MadeEvent, MakeEvents, Maker
from outbox_spark.rows import UNREADABLE, first_faulty


def events_of(maker: Maker, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the events that a function makes of each row: one, none (None), or several; as columns of text.

    It gives mappings of some of the fields; a payload or headers that are no text become JSON. The other fields have
    the text that a column of the same value has.

    Raises:
        RowError: the function raised, or gave what is no event, or Python cannot hold a value of the row; the row is
            named.
    """
    kinds = pa.schema([(name, pa.string()) for name in maker.fields])
    for batch in batches:
        _refuse_unreadable(batch)
        events = [
            _as_texts(event, maker.fields, row)
            for row in batch.to_pylist()
            for event in _events_of_row(maker.function, row)
        ]
        yield pa.RecordBatch.from_pylist(events, kinds)


def _refuse_unreadable(batch: pa.RecordBatch) -> None:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for is_faulty, fault in UNREADABLE:
            if is_faulty(column):
                raise _no_event(_readable(batch, first_faulty(column, is_faulty)), f"column {name!r} {fault}")


def _readable(batch: pa.RecordBatch, place: int) -> dict[str, Any]:
    row = batch.take(pa.array([place]))
    return {
        name: column[0].as_py()
        for name, column in zip(row.schema.names, row.columns, strict=True)
        if not any(is_faulty(column) for is_faulty, _ in UNREADABLE)
    }


def _events_of_row(function: MakeEvents, row: dict[str, Any]) -> list[MadeEvent]:
    try:
        made = function(row)
        return [] if made is None else [made] if isinstance(made, Mapping) else list(made)
    except Exception as error:
        raise _no_event(row, f"{type(error).__name__}: {error}") from error


def _as_texts(event: object, names: tuple[str, ...], row: dict[str, Any]) -> dict[str, str | None]:
    try:
        if not isinstance(event, Mapping):
            raise ValueError(f"an event is a mapping, not {event!r:.200}")
        if unknown := event.keys() - set(names):
            raise ValueError(f"an event has {', '.join(names)}, not {', '.join(sorted(map(str, unknown)))}")
        return {name: _as_text(name, event.get(name)) for name in names}
    except ValueError as error:
        raise _no_event(row, str(error)) from None


def _as_text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        text = value
    elif name in {"payload", "headers"}:
        text = _json(name, value)
    elif isinstance(value, Decimal):
        text = f"{value:f}"  # not 1.2E-7
    elif type(value) in {int, date, UUID}:
        text = str(value)
    else:
        raise ValueError(f"{name} takes text, a whole number, a decimal, a date or a UUID, not {value!r:.200}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds {text[error.start : error.end]!r}, which is not UTF-8") from None
    return text


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} has no JSON: {error}") from None


def _no_event(row: dict[str, Any], fault: str) -> RowError:
    return RowError(" ".join(f"the row {row!r:.200} makes no event: {fault}".split()))
