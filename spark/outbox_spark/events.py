"""Events that a Python function makes of rows, on the executors and a batch of Arrow at a time."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyspark.sql import DataFrame

from outbox_spark.errors import RowError
from outbox_spark.rows import UNREADABLE, first_faulty

Event = Mapping[str, Any]
MakeEvents = Callable[[dict[str, Any]], Event | Iterable[Event] | None]


def made_by(function: MakeEvents, frame: DataFrame, fields: Iterable[str]) -> DataFrame:
    """Return the events that the function makes of each row: one, none (None), or several.

    It gets the row as a dict, and gives mappings of some of these fields; a payload or headers that are no text become
    JSON. The other fields have the text that a column of the same value has.

    Raises:
        RowError: the function raised, or gave what is no event, or Python cannot hold a value of the row; the row is
            named.
    """
    names = tuple(fields)

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return events_of(function, names, batches)

    return frame.mapInArrow(make, ", ".join(f"{name} string" for name in names))


def events_of(
    function: MakeEvents, names: tuple[str, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Return the events of each batch, as columns of text; as `made_by`, on an executor."""
    kinds = pa.schema([(name, pa.string()) for name in names])
    for batch in batches:
        _refuse_unreadable(batch)
        events = [_as_texts(event, names, row) for row in batch.to_pylist() for event in _events_of_row(function, row)]
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


def _events_of_row(function: MakeEvents, row: dict[str, Any]) -> list[Event]:
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
