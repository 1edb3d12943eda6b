"""Events that a function makes: what is no event is refused with the row that it was made of."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import outbox_spark
from outbox_spark.events import events_of
from outbox_spark.plan import MakeEvents, Maker

NAMES = ("aggregate_id", "payload")
THE_ROW = "the row {'key': 'C2', 'due': datetime.date(2026, 1, 1)} makes no event"


def raises(row: dict[str, Any]) -> dict[str, Any]:
    return {"payload": row["no such column"]}


def raises_midway(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"payload": {}}
    raise LookupError(f"no rate for {row['key']}\nin the table")


@pytest.mark.parametrize(
    ("function", "fault"),
    [(raises, "KeyError: 'no such column'"), (raises_midway, "LookupError: no rate for C2 in the table")],
)
def test_a_function_that_raises_names_its_row(function: MakeEvents, fault: str) -> None:
    assert refused_as(lambda row: function(row) if row["key"] == "C2" else None) == f"{THE_ROW}: {fault}"


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (5, "TypeError: 'int' object is not iterable"),
        ([None], "an event is a mapping, not None"),
        ("text", "an event is a mapping, not 't'"),
        ({"id": 1}, "an event has aggregate_id, payload, not id"),
        ({"aggregate_id": 1.5}, "aggregate_id takes text, a whole number, a decimal, a date or a UUID, not 1.5"),
        ({"aggregate_id": "\ud800"}, "aggregate_id holds '\\ud800', which is not UTF-8"),
        ({"payload": {"name": "a\udfff"}}, "payload holds '\\udfff', which is not UTF-8"),
        ({"payload": {("a", "b"): 1}}, "payload has no JSON: keys must be str, int, float, bool or None, not tuple"),
        ({"payload": float("nan")}, "payload has no JSON: Out of range float values are not JSON compliant"),
    ],
)
def test_what_is_no_event_is_refused_with_its_row(made: Any, fault: str) -> None:
    assert refused_as(lambda row: made if row["key"] == "C2" else None).startswith(f"{THE_ROW}: {fault}")


@pytest.mark.parametrize(
    ("changed", "readable", "fault"),
    [
        ({"key": b"C\xff"}, "{'due': datetime.date(2026, 1, 1)}", "column 'key' holds text that is not UTF-8"),
        ({"due": -719_163}, "{'key': 'C2'}", "column 'due' holds a time outside of the years 1 to 9999"),
    ],
)
def test_a_row_that_python_has_no_values_for_is_named(changed: dict[str, Any], readable: str, fault: str) -> None:
    words = refused_as(lambda row: {"payload": row}, **changed)

    assert words == f"the row {readable} makes no event: {fault}"


def refused_as(function: MakeEvents, **changed: Any) -> str:
    """Make events of three rows, of which the last is refused; return the words."""
    with pytest.raises(outbox_spark.RowError) as refused:
        list(events_of(Maker(function, NAMES), [rows("C1"), rows("C1", "C2", **changed)]))
    return str(refused.value)


def rows(*keys: str, **changed: Any) -> pa.RecordBatch:
    """Make rows with these keys; the last has these values in place of what it has."""
    values = [{"key": key.encode(), "due": 20_454} for key in keys]
    values[-1] |= changed
    batch = pa.RecordBatch.from_pylist(values, pa.schema([("key", pa.binary()), ("due", pa.int32())]))
    text = batch["key"].cast(options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))
    return pa.RecordBatch.from_pydict({"key": text, "due": batch["due"].cast(pa.date32())})
