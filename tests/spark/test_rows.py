"""What only a value can tell: refused with the row's key, before the database sees it."""

from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.prepare import prepare
from outbox_spark.rows import staging_rows
from tests.spark.releases import schema_of

GOOD = {
    "id": "00000000-0000-0000-0000-00000000002a",
    "key": "C1",
    "step": "1",
    "short": "abcde",
    "ratio": 0.5,
    "body": "{}",
    "headers": '{"a": 1}',
}
SCHEMA = "id string, key string, step string, short string, ratio double, body string, headers string"
OPTIONS = {"dbtable": "billing.thing", "aggregateIdColumn": "key", "sequenceColumn": "step", "headersColumn": "headers"}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"key": ""}, "its key is the empty string (NULL asks for no order)"),
        ({"key": "ß" * 128}, "its key is over 255 bytes"),
        ({"step": None}, "its sequence is NULL"),
        ({"short": "abcdef"}, "column 'short' is longer than character varying(5)"),
        ({"short": "a\0"}, "column 'short' holds a NUL character"),
        ({"id": "no-uuid"}, "column 'id': 'no-uuid' is no UUID"),
        ({"ratio": float("nan")}, "column 'ratio': NaN and infinity have no JSON"),
        ({"ratio": float("-inf")}, "column 'ratio': NaN and infinity have no JSON"),
        ({"headers": "[1]"}, "its headers are no JSON object"),
        ({"headers": r'{"a": "\u0000"}'}, "its headers hold a NUL character"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_value_that_cannot_be_written_is_named_by_its_row(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection, changed: dict[str, Any], fault: str
) -> None:
    rows = _rows({"key": "C0"}, changed)
    with pytest.raises(outbox_spark.RowError) as refused:
        _stage(connection, {**options, **OPTIONS}, rows)

    key, step = ({**GOOD, **changed}[name] for name in ("key", "step"))
    assert str(refused.value) == (
        f"the row with key {key!r} and step {step!r} cannot be written to billing.thing and the outbox: {fault}"
    )


def test_a_payload_that_is_null_is_refused(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    with pytest.raises(outbox_spark.RowError, match=r"key 'C1' and step '1' cannot be written .*: its payload is NULL"):
        _stage(connection, {**options, **OPTIONS, "payloadColumn": "body"}, _rows({}, {"body": None}))


def _rows(*changes: dict[str, Any]) -> pa.RecordBatch:
    kinds = {name: pa.float64() if name == "ratio" else pa.string() for name in GOOD}
    return pa.RecordBatch.from_pylist([{**GOOD, **change} for change in changes], pa.schema(kinds))


def _stage(connection: psycopg.Connection, options: dict[str, str], rows: pa.RecordBatch) -> None:
    connection.execute("CREATE TABLE billing.thing (id uuid, key text, short varchar(5), ratio float8, body json)")
    save, _ = prepare(options, schema_of(SCHEMA), overwrite=False)
    staging_rows(save, rows, partition=0, first=0)
