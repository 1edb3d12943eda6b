"""Fields of the payload: the text that the database takes out of the JSON becomes the type that the read asked for.

On the executors, so that one value that does not fit fails neither the statement nor, unless asked for, the read.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime, tzinfo
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from outbox_spark.errors import ReadError
from outbox_spark.rows import fails, first_faulty, is_of_no_year

FIELD_TYPES: frozenset[type[spark.DataType]] = frozenset(
    {
        spark.StringType,
        spark.BooleanType,
        spark.ByteType,
        spark.ShortType,
        spark.IntegerType,
        spark.LongType,
        spark.FloatType,
        spark.DoubleType,
        spark.DecimalType,
        spark.DateType,
        spark.TimestampType,
        spark.TimestampNTZType,
    }
)
REMEDY = "(mode FAILFAST; PERMISSIVE makes it null)"

Make = Callable[[pa.Array], pa.Array]


def as_fields(texts: list[pa.Array], kind: pa.StructType, ids: pa.Array | None) -> pa.StructArray:
    """Return the struct of the fields; what is no text of a field's type is null.

    Args:
        ids: of the rows, when a value that does not fit fails the read; None: it is null.
    Raises:
        ReadError: a value does not fit; row and field are named, and the value is not.
    """
    fields = [_as_field(text, field, ids) for text, field in zip(texts, kind, strict=True)]
    return pa.StructArray.from_arrays(fields, fields=list(kind))


def refuse_no_object(is_no_object: pa.Array, ids: pa.Array) -> None:
    """Raise ReadError when a payload has no fields; its row is named."""
    place = pc.index(is_no_object, True).as_py()
    if place >= 0:
        raise ReadError(f"the payload of row {ids[place]} is no JSON object with fields that can be read {REMEDY}")


def _as_field(text: pa.Array, field: pa.Field, ids: pa.Array | None) -> pa.Array:
    make = partial(_of_type, field.type)
    try:
        return make(text)
    except ValueError:
        if ids is None:
            return _what_fits(make, text, field.type)
        row = ids[first_faulty(text, partial(fails, make))]
        raise ReadError(f"field {field.name!r} of the payload of row {row} is no {field.type} {REMEDY}") from None


def _what_fits(make: Make, text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values, and null for each that does not fit: found by halving, since most of a batch fits."""
    try:
        return make(text)
    except ValueError:
        if len(text) == 1:
            return pa.nulls(1, kind)
    middle = len(text) // 2
    return pa.concat_arrays([_what_fits(make, half, kind) for half in (text[:middle], text[middle:])])


def _of_type(kind: pa.DataType, text: pa.Array) -> pa.Array:
    """Return the values of these texts.

    Raises:
        ValueError: one of them has no zone.
    """
    if pa.types.is_temporal(kind):
        return _times(kind, text)
    values = text.cast(kind)
    if pa.types.is_floating(kind):
        is_word = pc.match_substring(text, "inf", ignore_case=True)
        if pc.any(pc.and_not(pc.is_inf(values), is_word)).as_py():
            raise ValueError("a number beyond the type")
    return values


def _times(kind: pa.DataType, text: pa.Array) -> pa.Array:
    # Arrow is faster by far. It reads the plain forms, of moments only when all of them name a zone, or all of them do
    # not.
    for parsed in (kind, pa.timestamp("us")):
        with suppress(pa.ArrowInvalid):
            return _within_years(text.cast(parsed).cast(kind))
    make = _date if pa.types.is_date(kind) else partial(_moment, zone=None if kind.tz is None else UTC)
    return _within_years(pa.array([None if value is None else make(value) for value in text.to_pylist()], kind))


def _within_years(times: pa.Array) -> pa.Array:
    if is_of_no_year(times):
        raise ValueError("a time outside of the years 1 to 9999")
    return times


def _date(text: str) -> date:
    return date.fromisoformat(text) if len(text) <= len("2026-12-01") else datetime.fromisoformat(text).date()


def _moment(text: str, *, zone: tzinfo | None) -> datetime:
    """Return a time of a type with this zone, which a text without one is in; of a type without, the text's own."""
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=zone) if zone is None or moment.tzinfo is None else moment
