"""Every type arrives as it was, whatever the schema: drawn schemas and values, through Spark and back by psycopg."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import outbox_spark
from outbox_spark import OutboxBatch
from outbox_spark.tables import describe, plan_rows

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
WHOLE = st.integers(-(2**31), 2**31 - 1)


def _plain(value: Any) -> Any:
    return value


def _as_float32(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("f", value)


def _in_json(value: Any) -> Any:
    """Return what JSON has of a value with times in it."""
    return json.loads(json.dumps(value, default=lambda at: at.isoformat(timespec="microseconds")))


@dataclass(frozen=True)
class ColumnType:
    """A type of Spark's, the column that takes it, and its values."""

    spark: str
    postgres: str
    values: st.SearchStrategy[Any]
    seen: Callable[[Any], Any] = _plain  # what of a value is compared


def _decimal(precision: int, scale: int) -> ColumnType:
    kind = f"decimal({precision},{scale})"
    most = 10**precision - 1
    # From text: whatever calculates with Decimal rounds to 28 digits.
    values = st.integers(-most, most).map(lambda digits: Decimal(f"{digits}E-{scale}"))
    return ColumnType(kind, kind.replace("decimal", "numeric"), values)


def _times(**zone: Any) -> st.SearchStrategy[datetime]:
    return st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), **zone)  # noqa: DTZ001  # drawn in the zone


KINDS = [
    ColumnType("tinyint", "smallint", st.integers(-128, 127)),
    ColumnType("smallint", "smallint", st.integers(-(2**15), 2**15 - 1)),
    ColumnType("int", "integer", WHOLE),
    ColumnType("bigint", "bigint", st.integers(-(2**63), 2**63 - 1)),
    ColumnType("bigint", "numeric(19)", st.integers(-(2**63), 2**63 - 1)),
    ColumnType("float", "real", st.floats(width=32, allow_nan=False), _as_float32),
    ColumnType("double", "double precision", st.floats(allow_nan=False)),
    ColumnType("boolean", "boolean", st.booleans()),
    ColumnType("string", "text", TEXT),
    ColumnType("binary", "bytea", st.binary(max_size=20)),
    ColumnType("date", "date", st.dates(date(1600, 1, 1))),
    ColumnType("timestamp", "timestamptz", _times(timezones=st.just(UTC))),
    ColumnType("timestamp_ntz", "timestamp", _times()),
    ColumnType("time(6)", "time", st.times()),
    ColumnType("time(0)", "time(0)", st.times().map(lambda at: at.replace(microsecond=0))),
    ColumnType("array<time(6)>", "time[]", st.lists(st.none() | st.times(), max_size=3)),
    ColumnType("array<int>", "integer[]", st.lists(st.none() | WHOLE, max_size=3)),
    ColumnType("array<string>", "text[]", st.lists(st.none() | TEXT, max_size=3)),
    ColumnType("array<decimal(9,2)>", "numeric(9,2)[]", st.lists(_decimal(9, 2).values, max_size=3)),
    ColumnType("array<timestamp>", "timestamptz[]", st.lists(_times(timezones=st.just(UTC)), max_size=3)),
    ColumnType("array<int>", "json", st.lists(st.none() | WHOLE, max_size=3)),
    ColumnType("map<string,array<int>>", "jsonb", st.dictionaries(TEXT, st.lists(WHOLE, max_size=2), max_size=3)),
    ColumnType(
        "struct<a:int,b:string>", "json", st.fixed_dictionaries({"a": st.none() | WHOLE, "b": st.none() | TEXT})
    ),
    ColumnType("struct<a:time(6)>", "json", st.fixed_dictionaries({"a": st.none() | st.times()}), _in_json),
    ColumnType("array<time(6)>", "jsonb", st.lists(st.none() | st.times(), max_size=3), _in_json),
    ColumnType("map<string,time(6)>", "json", st.dictionaries(TEXT, st.times(), max_size=3), _in_json),
]
ANY_DECIMAL = st.integers(1, 38).flatmap(
    lambda precision: st.integers(0, precision).map(lambda s: _decimal(precision, s))
)
SCHEMAS = st.lists(st.sampled_from(KINDS) | ANY_DECIMAL, min_size=8, max_size=16)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[ColumnType], list[list[Any]]]:
    """Draw a schema and some rows of it."""
    kinds = draw(SCHEMAS)
    row = st.tuples(*(st.none() | kind.values for kind in kinds)).map(list)
    return kinds, draw(st.lists(row, min_size=1, max_size=12))


@pytest.mark.timeout(300)
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],  # each example is a Spark job: to shrink one would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=tables())
def test_every_value_of_every_type_arrives_as_it_was(
    spark: SparkSession,
    database_url: str,
    connection: psycopg.Connection,
    drawn: tuple[list[ColumnType], list[list[Any]]],
) -> None:
    kinds, rows = drawn
    columns = ", ".join(f"c{place} {kind.postgres}" for place, kind in enumerate(kinds))
    connection.execute(f"DROP TABLE IF EXISTS drawn; CREATE TABLE drawn (number integer, {columns})")
    schema = "number int, " + ", ".join(f"c{place} {kind.spark}" for place, kind in enumerate(kinds))
    frame = spark.createDataFrame([[number, *row] for number, row in enumerate(rows)], schema)

    connection.execute("TRUNCATE outbox.batch")
    with OutboxBatch(spark, url=database_url, app_id="types", version=0) as batch:
        batch.rows(frame, table="drawn")

    written = connection.execute("SELECT * FROM drawn ORDER BY number").fetchall()
    seen = [[kind.seen(value) for kind, value in zip(kinds, row[1:], strict=True)] for row in written]
    assert seen == [[kind.seen(value) for kind, value in zip(kinds, row, strict=True)] for row in rows]


@pytest.mark.parametrize(
    ("spark_type", "table_type"),
    [
        ("interval day to second", "interval"),
        ("array<array<int>>", "integer[]"),
        ("array<bigint>", "integer[]"),
        ("array<string>", "jsonb[]"),
        ("struct<a:int>", "text"),
        ("struct<a:interval day to second>", "json"),
        ("map<binary,int>", "json"),
        ("string", "inet"),
        ("time(6)", "time(3)"),
        ("time(9)", "time"),
        ("time(9)", "text"),
        ("array<time(9)>", "time[]"),
        ("array<time(9)>", "json"),
        ("map<time(6),int>", "json"),
    ],
)
def test_a_type_that_does_not_fit_is_refused_by_name(
    spark: SparkSession, connection: psycopg.Connection, spark_type: str, table_type: str
) -> None:
    connection.execute(f"CREATE TABLE drawn (c {table_type})")

    with pytest.raises(outbox_spark.ColumnError, match="column 'c' is "):
        plan_rows(StructType.fromDDL(f"c {spark_type}"), describe(connection, "drawn"), ())
