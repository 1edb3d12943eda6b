"""`spark.read.format("outbox")`: what a DataFrame of the outbox holds."""

from datetime import UTC, datetime

import psycopg
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.reading.columns import COLUMNS
from tests.spark.frames import invoices, read, save
from tests.spark.releases import arrow_table, with_sources
from tests.spark.sent import add_sent

FIRST, SECOND = "2026-11-01", "2026-11-02"
EVERY_ROW = """
    SELECT id, message_id::text, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers::text,
        content_type, payload::text, payload_bytes, created_at, lane, state, attempts, available_at, last_error,
        held_behind, parked_at, quarantine, sent_at, (sent_at AT TIME ZONE 'UTC')::date, writer, batch_id,
        trace_context::text, written_as
    FROM outbox.message WHERE state = %s ORDER BY id
"""


@pytest.fixture
def days(connection: psycopg.Connection) -> psycopg.Connection:
    """Two days of sent rows."""
    add_sent(connection, FIRST, 40)
    add_sent(connection, SECOND, 30)
    return connection


def test_a_frame_holds_every_column_of_the_sent_rows_as_the_table_does(
    spark: SparkSession, days: psycopg.Connection, options: dict[str, str], database_url: str
) -> None:
    save(invoices(spark, 5), options)  # pending: not sent

    frame = read(spark, database_url)

    assert frame.columns == list(COLUMNS)
    rows = arrow_table(frame).sort_by("id").to_pylist()
    assert [tuple(row.values()) for row in rows] == days.execute(EVERY_ROW, ["sent"]).fetchall()


def test_rows_of_another_state_come_with_that_state_alone(
    spark: SparkSession, days: psycopg.Connection, options: dict[str, str], database_url: str
) -> None:
    save(invoices(spark, 5), options)

    frame = read(spark, database_url, state="pending")

    assert [tuple(row.values()) for row in arrow_table(frame).sort_by("id").to_pylist()] == days.execute(
        EVERY_ROW, ["pending"]
    ).fetchall()


def test_a_filter_of_one_query_is_not_kept_for_the_next(
    spark: SparkSession, days: psycopg.Connection, database_url: str
) -> None:
    frame = read(spark, database_url)

    paid = frame.where(f"sent_day = date'{SECOND}' AND event_type = 'InvoicePaid'")

    assert (paid.count(), frame.count()) == (10, 70)


@with_sources
@pytest.mark.jobs
def test_a_frame_keeps_its_moment_and_each_query_of_a_catalog_table_has_its_own(
    spark: SparkSession, days: psycopg.Connection, database_url: str
) -> None:
    frame = read(spark, database_url, schema="id BIGINT")
    spark.sql("CREATE TABLE sent USING outbox")
    try:
        spark.read.option("url", database_url).table("sent").createOrReplaceTempView("sent_now")
        before = (frame.count(), spark.table("sent_now").count())
        add_sent(days, "2026-11-03", 1)
        after = (frame.count(), spark.table("sent_now").count())
        days.execute("VACUUM FULL outbox.message_sent")

        with pytest.raises(Exception, match="load") as rewritten:
            frame.count()
        now = (read(spark, database_url, schema="id BIGINT").count(), spark.table("sent_now").count())
    finally:
        spark.sql("DROP VIEW IF EXISTS sent_now")
        spark.sql("DROP TABLE sent")

    assert (before, after, now) == ((70, 70), (70, 71), (71, 71))
    assert str(outbox_spark.reason(rewritten.value)).endswith("whose plan it keeps: load() it again")


def test_fields_of_the_payload_become_columns_and_only_named_columns_are_read(
    spark: SparkSession, days: psycopg.Connection, database_url: str
) -> None:
    fields = "invoice_id STRING, amount DECIMAL(12,2), due TIMESTAMP, id BIGINT"
    by_option = read(spark, database_url, payloadSchema=fields, endingDay=FIRST)
    named = read(spark, database_url, schema=f"id BIGINT, payload STRUCT<{fields}>")

    sums = by_option.selectExpr("sum(payload.amount) AS amount", "count(payload.due) AS due", "count(payload.id) AS id")
    third = arrow_table(named.where("id = 3")).to_pylist()

    expected = "SELECT sum((payload->>'amount')::numeric), count(payload), 0 FROM outbox.message WHERE sent_at < %s"
    assert sums.collect() == days.execute(expected, [f"{SECOND}Z"]).fetchall()
    assert third[0]["payload"]["invoice_id"] == "Ü-3"
    assert third[0]["payload"]["due"] == datetime(2026, 12, 1, tzinfo=UTC)
    assert list(third[0]) == ["id", "payload"]


@pytest.mark.jobs
def test_a_decimal_is_never_rounded(spark: SparkSession, days: psycopg.Connection, database_url: str) -> None:
    rounded = read(spark, database_url, payloadSchema="amount DECIMAL(12,1)")
    failing = read(spark, database_url, payloadSchema="amount DECIMAL(12,1)", mode="FAILFAST")

    with pytest.raises(Exception, match="amount") as too_long:
        failing.count()

    assert rounded.where("payload.amount IS NOT NULL").count() == 0
    assert "is no decimal128(12, 1) (mode FAILFAST; PERMISSIVE" in str(outbox_spark.reason(too_long.value))


@with_sources
def test_what_cannot_be_read_is_refused_by_name_before_any_task(spark: SparkSession, database_url: str) -> None:
    with pytest.raises(Exception, match="option") as options:
        read(
            spark, "mysql://x", stat="x", startingDay="yesterday", numPartitions="0", startingId="9", endingId="8"
        ).count()
    with pytest.raises(Exception, match="option") as moving:
        read(spark, database_url, state="pending", startingDay=FIRST).count()
    with pytest.raises(Exception, match="column") as columns:
        spark.read.format("outbox").option("url", database_url).schema(
            "id INT, payload STRUCT<x MAP<STRING, INT>>, y INT"
        ).load().count()

    assert outbox_spark.reason(options.value) == (
        "option 'stat' is unknown; did you mean state?; "
        "option url takes a libpq URL: postgresql://user@host:5432/database; "
        "option startingDay takes a day such as 2026-11-21, not 'yesterday'; "
        "option numPartitions takes a whole number from 1 to 100000, not '0'; startingId 9 is above endingId 8"
    )
    assert outbox_spark.reason(moving.value) == (
        "option startingDay is for sent rows; rows that are pending are read by one task"
    )
    words = str(outbox_spark.reason(columns.value))
    assert "column 'id' is bigint, not int" in words
    assert "field 'x' of the payload cannot be read as map<string,int>" in words
    assert "column 'y' is unknown" in words
