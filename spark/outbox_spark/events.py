"""Events that a Python function makes of rows, on the executors and a batch of Arrow at a time."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from outbox_spark.errors import RowError

Event = Mapping[str, Any]
MakeEvents = Callable[[dict[str, Any]], Event | Iterable[Event] | None]


def made_by(function: MakeEvents, frame: DataFrame, fields: Iterable[str]) -> DataFrame:
    """Give the events that the function makes of each row: one, none (None), or several.

    It gets the row as a dict, and gives mappings of some of these fields; a payload or headers that are no text become
    JSON.
    """
    names = tuple(fields)

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kinds = pa.schema([(name, pa.string()) for name in names])
        for batch in batches:
            events = [_as_texts(event, names) for row in batch.to_pylist() for event in _several(function(row))]
            yield pa.RecordBatch.from_pylist(events, kinds)

    return frame.mapInArrow(make, ", ".join(f"{name} string" for name in names))


def _several(made: Event | Iterable[Event] | None) -> Iterable[Event]:
    if made is None:
        return ()
    return (made,) if isinstance(made, Mapping) else made


def _as_texts(event: Event, names: tuple[str, ...]) -> dict[str, str | None]:
    if unknown := event.keys() - set(names):
        raise RowError(f"an event has {', '.join(names)}, not {', '.join(sorted(unknown))}: {event!r:.200}")
    return {name: _as_text(event.get(name)) for name in names}


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
