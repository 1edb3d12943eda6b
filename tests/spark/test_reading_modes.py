"""The option `mode` of a read: what becomes of a payload that lacks what was asked for, as with `from_json`."""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.errors import OptionError, ReadError
from outbox_spark.reading.plan import plan_read
from outbox_spark.reading.reader import OutboxReader
from tests.spark.frames import read
from tests.spark.releases import with_sources
from tests.support.days import make_days

DAY = "2026-11-01"
FIELDS = (
    "text STRING, flag BOOLEAN, tiny TINYINT, small SMALLINT, whole INT, number BIGINT, rough FLOAT, real DOUBLE, "
    "amount DECIMAL(6,2), due DATE, at TIMESTAMP, local TIMESTAMP_NTZ"
)
NAMES = tuple(field.split()[0] for field in FIELDS.split(", "))
NOTHING = dict.fromkeys(NAMES)
ADD = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, payload_bytes, state, sent_at)
    VALUES ('customer', 'C1', 'InvoiceIssued', %s::text::json, %s, 'sent', %s::timestamptz)
"""
GOOD = (
    '{"text": "a\\u00fc\\ud83d\\ude00", "flag": true, "tiny": -128, "small": 300, "whole": 70000, "number": 5000000000,'
    '"rough": 0.5, "real": 1e3, "amount": 12.50, "due": "2026-12-01", "at": "2026-12-01T05:30:00+05:30",'
    '"local": "2026-12-01 05:30:00.5"}'
)
READ_GOOD = {
    "text": "aü😀",
    "flag": True,
    "tiny": -128,
    "small": 300,
    "whole": 70000,
    "number": 5_000_000_000,
    "rough": 0.5,
    "real": 1000.0,
    "amount": Decimal("12.50"),
    "due": date(2026, 12, 1),
    "at": datetime(2026, 12, 1, tzinfo=UTC),
    "local": datetime.fromisoformat("2026-12-01 05:30:00.5"),
}
# A payload, and which of its fields are read.
PAYLOADS: list[tuple[str, dict[str, Any]]] = [
    (GOOD, READ_GOOD),
    ('"a text"', {}),
    ("7", {}),
    ("[1]", {}),
    ("null", {}),
    ("{}", {}),
    ('{"amount": "much", "text": "kept"}', {"text": "kept"}),
    ('{"amount": 1.234, "number": 1.5, "text": {"deep": [1,  2]}}', {"text": '{"deep": [1,  2]}'}),
    ('{"amount": 10000, "tiny": 128, "number": 9223372036854775808, "real": 1e999, "flag": 7}', {}),
    ('{"due": "2026-02-30", "at": "soon", "local": 5, "whole": null, "text": 1.50}', {"text": "1.50"}),
    ('{"at": "0001-01-01T00:00:00+05:00", "amount": "7.25"}', {"amount": Decimal("7.25")}),
    # No text of the database holds these; their rows are as malformed as if they were no objects.
    ('{"text": "\\u0000", "number": 1}', {}),
    ('{"other": ["\\ud83d"], "number": 2}', {}),
    ('{"other": "\\ude00", "number": 3}', {}),
    ('{"other": "\\ud83d\\ud83d\\ude00", "number": 4}', {}),
    ('{"text": "\\\\u0000\\\\\\\\ud83d", "number": 5}', {"text": "\\u0000\\\\ud83d", "number": 5}),
]


def add(connection: psycopg.Connection, *payloads: str | None) -> None:
    """Make a day of sent rows with these payloads, the first of id 1; without a payload it has bytes."""
    connection.execute(make_days("%s"), [DAY])
    for payload in payloads:
        connection.execute(ADD, [payload, b"\x00" if payload is None else None, f"{DAY} 12:00Z"])


def reader(spark: SparkSession, url: str, fields: str, **options: str) -> OutboxReader:
    schema = spark.createDataFrame([], f"payload STRUCT<{fields}>").schema
    return OutboxReader(plan_read({"url": url, **options}, schema))


def payloads(reader: OutboxReader) -> list[dict[str, Any]]:
    return [
        row
        for task in reader.partitions()
        for batch in reader.read(task)
        for row in batch.column("payload").to_pylist()
    ]


@pytest.mark.every_postgres
def test_a_field_of_the_wrong_type_and_a_payload_without_fields_are_null(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    add(connection, *(payload for payload, _ in PAYLOADS), None)

    rows = payloads(reader(spark, database_url, FIELDS))

    assert rows == [*(NOTHING | fields for _, fields in PAYLOADS), NOTHING]
    assert payloads(reader(spark, database_url, FIELDS, mode="permissive")) == rows


@pytest.mark.every_postgres
@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        ('"a text"', "the payload of row 3 is no JSON object with fields that can be read"),
        ("null", "the payload of row 3 is no JSON object with fields that can be read"),
        ('{"other": "\\u0000"}', "the payload of row 3 is no JSON object with fields that can be read"),
        ('{"amount": "secret"}', "field 'amount' of the payload of row 3 is no decimal128(6, 2)"),
        ('{"amount": 1.234}', "field 'amount' of the payload of row 3 is no decimal128(6, 2)"),
        ('{"due": "2026-02-30"}', "field 'due' of the payload of row 3 is no date32[day]"),
        ('{"real": 1e999}', "field 'real' of the payload of row 3 is no double"),
    ],
)
def test_failfast_names_the_row_that_cannot_be_read(
    spark: SparkSession, connection: psycopg.Connection, database_url: str, payload: str, fault: str
) -> None:
    add(connection, GOOD, None, payload, '{"local": "later"}')

    with pytest.raises(ReadError) as failed:
        payloads(reader(spark, database_url, FIELDS, mode="FAILFAST"))

    assert str(failed.value) == f"{fault} (mode FAILFAST; PERMISSIVE makes it null)"


def test_failfast_reads_what_fits(spark: SparkSession, connection: psycopg.Connection, database_url: str) -> None:
    add(connection, GOOD, None, '{"text": null}')

    assert payloads(reader(spark, database_url, FIELDS, mode="failfast")) == [READ_GOOD, NOTHING, NOTHING]


def test_a_mode_that_is_none_is_refused(spark: SparkSession, database_url: str) -> None:
    with pytest.raises(OptionError, match=r"^option mode takes 'PERMISSIVE' or 'FAILFAST', not 'DROPMALFORMED'$"):
        reader(spark, database_url, FIELDS, mode="DROPMALFORMED")


def test_a_query_has_the_payload_beside_the_fields_that_are_missing(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    add(connection, '{"amount": 1}', '"a text"')
    fields = read(spark, database_url, payloadSchema="amount INT")
    texts = read(spark, database_url, schema="id BIGINT, payload STRING")

    faulty = fields.where("payload.amount IS NULL").select("id").join(texts, "id").collect()

    assert [tuple(row) for row in faulty] == [(2, '"a text"')]


@with_sources
@pytest.mark.drills
def test_a_stream_takes_the_mode(
    spark: SparkSession, connection: psycopg.Connection, database_url: str, tmp_path: Path
) -> None:
    """A row of a stream cannot be read; FAILFAST ends the stream and names the row, PERMISSIVE reads null."""
    add(connection, '{"amount": 1}', '"a text"')

    def run(mode: str) -> list[int | None]:
        seen: list[int | None] = []
        stream = spark.readStream.format("outbox").options(url=database_url, payloadSchema="amount INT", mode=mode)
        query = stream.load().select("payload.amount").writeStream
        query = query.foreachBatch(lambda frame, _: seen.extend(row["amount"] for row in frame.collect()))
        query.option("checkpointLocation", str(tmp_path / mode)).trigger(availableNow=True).start().awaitTermination()
        return seen

    with pytest.raises(Exception, match="row 2") as failed:
        run("FAILFAST")

    assert run("PERMISSIVE") == [1, None]
    assert "the payload of row 2 is no JSON object" in str(outbox_spark.reason(failed.value))
