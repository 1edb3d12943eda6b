"""Rows with a value that no table takes, and what is said of each."""

from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from outbox_spark.spark_api import arrow_schema

TABLE = """
    CREATE DOMAIN billing.share AS integer CHECK (value BETWEEN 0 AND 100);
    CREATE TABLE billing.thing (
        key text, share billing.share, body json, tags varchar(3)[], codes text[], facts jsonb, due date,
        ids uuid[], at timestamptz, ratios json, rates json, "by" json
    )
"""
TEXT = spark.StringType()
COLUMNS = {
    "key": TEXT,
    "share": spark.IntegerType(),
    "body": TEXT,
    "tags": spark.ArrayType(TEXT),
    "codes": spark.ArrayType(TEXT),
    "facts": spark.MapType(TEXT, TEXT),
    "due": spark.DateType(),
    "ids": spark.ArrayType(TEXT),
    "at": spark.TimestampType(),
    "ratios": spark.ArrayType(spark.DoubleType()),
    "rates": spark.MapType(TEXT, spark.DoubleType()),
    "by": spark.StructType([spark.StructField("days", spark.ArrayType(spark.DateType()))]),
}
# Text that is not UTF-8 comes from bytes.
IN_BYTES = {"body": pa.binary(), "codes": pa.list_(pa.binary())}
SCHEMA = spark.StructType([spark.StructField(name, kind) for name, kind in COLUMNS.items()])
NAN = float("nan")
FAULTS: list[tuple[str, Any, str]] = [
    ("share", 101, "column 'share': value for domain billing.share violates check constraint \"share_check\""),
    ("body", "{oops", "column 'body': invalid input syntax for type json (Token \"oops\" is invalid.)"),
    ("body", b"\xff", "column 'body' holds text that is not UTF-8"),
    ("codes", ["a", b"\xff"], "column 'codes' holds text that is not UTF-8"),
    ("codes", ["a", "b\0"], "column 'codes' holds a NUL character"),
    ("facts", [("a\0", "b")], "column 'facts' holds a NUL character"),
    ("tags", ["abc", "abc "], "column 'tags' is longer than character varying(3)[]"),
    ("due", -2_147_472_691, "column 'due' holds a time outside of the years 1 to 9999"),
    ("at", 2**63 - 1, "column 'at' holds a time outside of the years 1 to 9999"),
    ("by", {"days": [None, -719_163]}, "column 'by' holds a time outside of the years 1 to 9999"),
    ("ids", [None, "no-uuid"], "column 'ids': 'no-uuid' is no UUID"),
    ("ratios", [0.5, NAN], "column 'ratios': NaN and infinity have no JSON"),
    ("rates", [("a", NAN)], "column 'rates': NaN and infinity have no JSON"),
]


def row(number: int) -> dict[str, Any]:
    return {
        "key": f"C{number}",
        "share": number,
        "body": "{}",
        "tags": ["a", None],
        "codes": [],
        "facts": [("b", None)],
        "due": date(1, 1, 1),
        "ids": ["00000000-0000-0000-0000-00000000002a"],
        "at": datetime(9999, 12, 31, tzinfo=UTC),
        "ratios": [0.5],
        "rates": None if number % 2 else [("a", 1.5)],
        "by": {"days": [date(9999, 12, 31)]},
    }


def rows_with(column: str, value: Any, *, count: int = 1, place: int = 0) -> pa.RecordBatch:
    """Make rows of which one has this value."""
    rows = [row(number) for number in range(count)]
    rows[place][column] = value
    arrays = [
        pa.array([each[field.name] for each in rows], IN_BYTES.get(field.name, field.type)).cast(
            options=pc.CastOptions(field.type, allow_invalid_utf8=True)
        )
        for field in arrow_schema(SCHEMA)
    ]
    return pa.RecordBatch.from_arrays(arrays, list(COLUMNS))
