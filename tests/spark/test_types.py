"""Every type arrives as it was, whatever the schema: drawn schemas and values, through Spark and back by psycopg."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import outbox_spark
from outbox_spark import OutboxBatch, RowError
from outbox_spark.asked import row_options
from outbox_spark.load import load
from outbox_spark.prepare import prepare
from outbox_spark.spark_api import TIME_TYPES
from outbox_spark.tables import describe, plan_rows
from tests.spark.releases import schema_of, with_nanoseconds, with_time, without_time

Options = dict[str, str]
DRAWN = {"dbtable": "drawn", "aggregateIdColumn": "key"}
pytestmark = pytest.mark.usefixtures("spark")  # schema_of needs a session

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
KINDS = [kind for kind in KINDS if TIME_TYPES or "time(" not in kind.spark]
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
        ("int", "inet"),
        ("array<int>", "inet[]"),
        ("string", "integer"),
        pytest.param("time(6)", "time(3)", marks=with_time),
        pytest.param("time(9)", "time", marks=with_nanoseconds),
        pytest.param("time(9)", "text", marks=with_nanoseconds),
        pytest.param("array<time(9)>", "time[]", marks=with_nanoseconds),
        pytest.param("array<time(9)>", "json", marks=with_nanoseconds),
        pytest.param("map<time(6),int>", "json", marks=with_time),
    ],
)
def test_a_type_that_does_not_fit_is_refused_by_name(
    spark: SparkSession, connection: psycopg.Connection, spark_type: str, table_type: str
) -> None:
    connection.execute(f"CREATE TABLE drawn (c {table_type})")

    with pytest.raises(outbox_spark.ColumnError, match="column 'c' is "):
        plan_rows(schema_of(f"c {spark_type}"), describe(connection, "drawn"), row_options())


# Types that Spark lacks, with a text that PostgreSQL reads and one that it refuses, or would round or cut.
AS_TEXT = [
    ("billing.mood", "happy", "glad", "invalid input value for enum"),
    ("inet", "10.0.0.1/8", "10.0.0", None),
    ("cidr", "10.0.0.0/8", "10.0.0.1/8", "invalid cidr value"),
    ("macaddr", "08:00:2b:01:02:03", "08", "invalid input syntax"),
    ("interval", "1 day 02:03:04.5", "a day", "invalid input syntax"),
    ("interval(0)", "1 day 02:03:04", "02:03:04.5", "fits interval(0)"),
    ("interval day to hour", "3 days 2 hours", "2:30:00", "fits interval day to hour"),
    ("int4range", "[1,5)", "[5,1)", "lower bound must be less"),
    ("tstzrange", "[2026-01-01 00:00+00,2026-02-01 00:00+00)", "[", "malformed range"),
    ("money", "12.50", "twelve", "invalid input syntax"),
    ("bit(3)", "101", "10101", "fits bit(3)"),
    ("bit varying(4)", "101", "10101", "fits bit varying(4)"),
    ("oid", "4294967295", "-", "invalid input syntax"),
    ("point", "(1,2)", "(1", "invalid input syntax"),
    ("tsvector", "'a' 'b'", "'", "syntax error in tsvector"),
    ("billing.mood[]", "{happy,sad}", "{glad}", "invalid input value for enum"),
    ("billing.small", "101", "111", "violates check constraint"),
]
MADE_TYPES = """
    CREATE TYPE billing.mood AS ENUM ('happy', 'sad');
    CREATE DOMAIN billing.small AS bit(3) CHECK (VALUE <> B'111')
"""


@pytest.fixture
def made_types(connection: psycopg.Connection) -> None:
    """Types that a user has made."""
    connection.execute(MADE_TYPES)


@pytest.mark.usefixtures("made_types")
def test_text_becomes_what_spark_has_no_type_for(
    spark: SparkSession, database_url: str, connection: psycopg.Connection
) -> None:
    columns = ", ".join(f"c{place} {kind}" for place, (kind, *_) in enumerate(AS_TEXT))
    connection.execute(f"CREATE TABLE drawn (moods billing.mood[], {columns})")
    texts = {f"c{place}": f.lit(text) for place, (_, text, *_) in enumerate(AS_TEXT)}
    frame = spark.range(2).select(
        f.array(f.lit("sad"), f.lit(None)).alias("moods"),
        *(f.when(f.col("id") == 1, text).alias(name) for name, text in texts.items()),
    )

    with OutboxBatch(spark, url=database_url, app_id="types", version=0) as batch:
        batch.rows(frame, table="drawn")

    same = " AND ".join(f"c{place}::text = %s::{kind}::text" for place, (kind, *_) in enumerate(AS_TEXT))
    found = connection.execute(f"SELECT {same} FROM drawn WHERE c0 IS NOT NULL", [text for _, text, *_ in AS_TEXT])
    assert found.fetchall() == [(True,)]
    assert connection.execute("SELECT count(*) FROM drawn WHERE moods = '{sad,NULL}'").fetchone() == (2,)


@without_time
def test_text_becomes_a_time_where_spark_has_no_type_for_it(
    spark: SparkSession, database_url: str, connection: psycopg.Connection
) -> None:
    connection.execute("CREATE TABLE drawn (number integer, c time, d time(0), e time[])")
    frame = spark.sql("SELECT 1 AS number, '12:30:00.5' AS c, '12:30' AS d, array('01:00', null) AS e")

    with OutboxBatch(spark, url=database_url, app_id="types", version=0) as batch:
        batch.rows(frame, table="drawn")

    ((row,),) = connection.execute("SELECT drawn::text FROM drawn").fetchall()
    assert row == '(1,12:30:00.5,12:30:00,"{01:00:00,NULL}")'


@pytest.mark.usefixtures("made_types")
@pytest.mark.parametrize(("kind", "good", "bad", "words"), [each for each in AS_TEXT if each[3]])
def test_text_that_postgres_does_not_keep_names_its_row(
    kind: str, good: str, bad: str, words: str, options: Options, connection: psycopg.Connection
) -> None:
    connection.execute(f"CREATE TABLE drawn (key text, c {kind})")
    save, _ = prepare({**options, **DRAWN}, schema_of("key string, c string"), overwrite=False)
    rows = pa.RecordBatch.from_pydict({"key": ["a", "b"], "c": [good, bad]})

    with pytest.raises(RowError) as refused:
        load(save, [rows], partition=0, attempt=1)

    assert "'b'" in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.every_postgres
def test_text_becomes_xml_where_the_server_has_it(options: Options, connection: psycopg.Connection) -> None:
    try:
        connection.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this server is built without libxml")
    connection.execute("CREATE TABLE drawn (key text, c xml)")
    save, _ = prepare({**options, **DRAWN}, schema_of("key string, c string"), overwrite=False)
    rows = pa.RecordBatch.from_pydict({"key": ["a", "b"], "c": ["<a>1</a>", "<a>"]})

    load(save, [rows.slice(0, 1)], partition=0, attempt=1)
    with pytest.raises(RowError, match=r"'b'.*invalid XML"):
        load(save, [rows], partition=0, attempt=2)


# Every modifier that a type of PostgreSQL has, and a value that it keeps and one that it does not.
MODIFIERS = [
    ("timestamp", "timestamptz({})", datetime(2026, 12, 31, 23, 59, 59, 999_999, UTC), range(6)),
    ("timestamp_ntz", "timestamp({})", datetime(2026, 12, 31, 23, 59, 59, 999_999), range(6)),  # noqa: DTZ001
    ("array<timestamp>", "timestamptz({})[]", [datetime(2026, 12, 31, 23, 59, 59, 999_999, UTC)], range(6)),
    ("string", "varchar({})", "abcdef ", range(1, 7)),
    ("string", "char({})", "abcdef ", range(1, 7)),
    ("string", "bit({})", "1111111", range(1, 7)),
    ("string", "bit varying({})", "1111111", range(1, 7)),
    ("string", "interval({})", "00:00:00.999999", range(6)),
]


@pytest.mark.parametrize(("spark_type", "postgres_type", "value", "modifiers"), MODIFIERS)
def test_no_value_is_rounded_or_cut_for_a_modifier(
    spark_type: str,
    postgres_type: str,
    value: Any,
    modifiers: range,
    options: Options,
    connection: psycopg.Connection,
) -> None:
    schema = schema_of(f"key string, c {spark_type}")
    rows = pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array([value])], names=["key", "c"])

    for modifier in modifiers:
        connection.execute(
            f"DROP TABLE IF EXISTS drawn; CREATE TABLE drawn (key text, c {postgres_type.format(modifier)})"
        )
        save, _ = prepare({**options, **DRAWN}, schema, overwrite=False)
        with pytest.raises(RowError, match="'a'"):
            load(save, [rows], partition=0, attempt=1)


@pytest.mark.parametrize(
    ("spark_type", "postgres_type"),
    [
        *(pytest.param(f"time({digits})", f"time({digits - 1})", marks=with_time) for digits in range(1, 7)),
        *((f"decimal({digits},2)", f"numeric({digits - 1},2)") for digits in (3, 18, 38)),
        *((f"decimal(9,{digits})", f"numeric(9,{digits - 1})") for digits in (1, 9)),
        ("decimal(9,0)", "numeric(9,-1)"),
        ("int", "numeric(9)"),
        ("bigint", "numeric(20,2)"),
    ],
)
def test_a_modifier_that_spark_types_have_too_is_compared_with_theirs(
    spark_type: str, postgres_type: str, connection: psycopg.Connection
) -> None:
    connection.execute(f"CREATE TABLE drawn (c {postgres_type})")

    with pytest.raises(outbox_spark.ColumnError, match="not every value fits unchanged"):
        plan_rows(schema_of(f"c {spark_type}"), describe(connection, "drawn"), row_options())


def test_only_a_batch_in_one_transaction_casts_text(options: Options, connection: psycopg.Connection) -> None:
    connection.execute("CREATE TABLE drawn (key text, c inet)")
    given = {**options, **DRAWN, "singleTask": "true"}

    with pytest.raises(outbox_spark.ColumnError, match="Only atomic=batch casts it"):
        prepare(given, schema_of("key string, c string"), overwrite=False)


def test_a_key_of_text_that_is_cast_is_compared_as_what_it_becomes(
    spark: SparkSession, database_url: str, connection: psycopg.Connection
) -> None:
    connection.execute("CREATE TABLE drawn (host inet PRIMARY KEY, n integer)")
    frame = spark.sql("SELECT * FROM VALUES ('10.0.0.1', 1), ('10.0.0.1/32', 2) AS t (host, n)")

    with (
        pytest.raises(outbox_spark.BatchError, match=r"2 rows for public\.drawn have the same upsertKeys, host"),
        OutboxBatch(spark, url=database_url, app_id="types", version=0) as batch,
    ):
        batch.rows(frame, table="drawn", upsert_keys=["host"])
