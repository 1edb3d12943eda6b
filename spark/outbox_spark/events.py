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

Event = Mapping[str, Any]
MakeEvents = Callable[[dict[str, Any]], Event | Iterable[Event] | None]


def made_by(function: MakeEvents, frame: DataFrame, fields: Iterable[str]) -> DataFrame:
    """Give the events that the function makes of each row: one, none (None), or several.

    It gets the row as a dict, and gives mappings of some of these fields; a payload or headers that are no text become
    JSON. The other fields have the text that a column of the same value has.

    Raises:
        RowError: what the function gave is no event; the row is named.
    """
    names = tuple(fields)

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kinds = pa.schema([(name, pa.string()) for name in names])
        for batch in batches:
            events = [_as_texts(event, names, row) for row in batch.to_pylist() for event in _several(function(row))]
            yield pa.RecordBatch.from_pylist(events, kinds)

    return frame.mapInArrow(make, ", ".join(f"{name} string" for name in names))


def _several(made: Event | Iterable[Event] | None) -> Iterable[Event]:
    if made is None:
        return ()
    return (made,) if isinstance(made, Mapping) else made


def _as_texts(event: Event, names: tuple[str, ...], row: dict[str, Any]) -> dict[str, str | None]:
    try:
        if unknown := event.keys() - set(names):
            raise ValueError(f"an event has {', '.join(names)}, not {', '.join(sorted(unknown))}")
        return {name: _as_text(name, event.get(name)) for name in names}
    except ValueError as error:
        raise RowError(f"the row {row!r:.200} makes no event: {error}") from None


def _as_text(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if name in {"payload", "headers"}:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    if isinstance(value, Decimal):
        return f"{value:f}"  # not 1.2E-7
    if type(value) in {int, date, UUID}:
        return str(value)
    raise ValueError(f"{name} takes text, a whole number, a decimal, a date or a UUID, not {value!r:.200}")
