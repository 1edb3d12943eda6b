"""`outbox_spark.write` and `read`, which every release of Spark has: what the format does, without the format."""

from datetime import date
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import outbox_spark
from tests.spark.frames import counts, in_python, invoices, one, staging_tables
from tests.spark.releases import arrow_table, with_sources, without_sources
from tests.spark.sent import add_sent

FIRST, SECOND = "2026-11-01", "2026-11-02"
NAME = {"app_id": "nightly", "version": 7}


@pytest.fixture
def named(options: dict[str, str]) -> dict[str, Any]:
    """Options of a good write, in Python's spelling."""
    return in_python(options)


@pytest.mark.parametrize(
    "atomic",
    [{}, {"atomic": "partition", "num_partitions": 4}, {"single_task": True}],
    ids=["batch", "partition", "single"],
)
def test_a_batch_is_written_once_however_it_is_atomic(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection, atomic: dict[str, Any]
) -> None:
    frame = invoices(spark, 40, partitions=1 if "single_task" in atomic else 4)

    for _ in range(2):
        outbox_spark.write(frame, **named, **NAME, **atomic)

    assert counts(connection)[:2] == (40, 40)
    committed = outbox_spark.committed(named["url"], "nightly", 7)
    assert committed is not None
    assert one(connection, "SELECT count(*) FROM outbox.message WHERE batch_id = 7 AND writer = 'nightly'") == 40
    assert staging_tables(connection) == []


def test_a_row_that_is_refused_fails_the_write_and_leaves_nothing(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    frame = invoices(spark, 40).selectExpr("*", "if(invoice_id = 'INV-30', '{oops', '{}') AS body")

    with pytest.raises(outbox_spark.RowError, match="the row with customer_id 'C2' cannot be written"):
        outbox_spark.write(frame, **named, payload_column="body")

    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []


def test_what_is_refused_is_refused_before_any_task_runs(spark: SparkSession, named: dict[str, Any]) -> None:
    with pytest.raises(outbox_spark.OptionError, match=r"option 'aggregateType' is unknown; known are url.*app_id"):
        outbox_spark.write(invoices(spark), **named, aggregateType="customer")
    with pytest.raises(outbox_spark.OptionError, match="option 'state_' is unknown; known are url"):
        outbox_spark.read(spark, url=named["url"], state_="sent")
    with pytest.raises(outbox_spark.ColumnError, match=r"column 'amount' of billing\.invoice is NOT NULL"):
        outbox_spark.write(invoices(spark).drop("amount"), **named)


def test_lists_and_days_are_taken_as_python_has_them(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    add_sent(connection, FIRST, 4)
    add_sent(connection, SECOND, 3)

    outbox_spark.write(invoices(spark, 1), **named, payload_columns=["invoice_id", "quantity"], headers_column=None)
    read = outbox_spark.read(spark, url=named["url"], starting_day=date(2026, 11, 2), starting_id=6)

    assert one(connection, "SELECT payload::text FROM outbox.message WHERE state = 'pending'") == (
        '{"invoice_id":"INV-0","quantity":1}'
    )
    assert sorted(row.id for row in read.select("id").collect()) == [6, 7]


@with_sources
def test_a_read_has_the_rows_and_columns_of_the_format(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    add_sent(connection, FIRST, 40)
    add_sent(connection, SECOND, 30)
    fields = "invoice_id STRING, amount DECIMAL(12,2), due TIMESTAMP"

    by_format = spark.read.format("outbox").options(url=database_url, payloadSchema=fields).load()
    by_function = outbox_spark.read(spark, url=database_url, payload_schema=fields, num_partitions=5)

    assert by_function.schema == by_format.schema
    assert arrow_table(by_function).sort_by("id") == arrow_table(by_format).sort_by("id")


def test_a_read_takes_columns_and_a_state_and_may_find_nothing(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    add_sent(connection, FIRST, 3)
    outbox_spark.write(invoices(spark, 2), **named)

    pending = outbox_spark.read(spark, url=named["url"], state="pending", schema="aggregate_id STRING")
    gone = outbox_spark.read(spark, url=named["url"], ending_day="2026-10-01")

    assert sorted(row.aggregate_id for row in pending.collect()) == ["C0", "C1"]
    assert gone.where("id > 0").count() == 0
    assert gone.columns == outbox_spark.read(spark, url=named["url"]).columns


def test_a_failure_of_a_read_tells_its_day(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    add_sent(connection, FIRST, 300)
    frame = outbox_spark.read(spark, url=database_url, schema="id BIGINT")
    assert frame.count() == 300
    connection.execute("VACUUM FULL outbox.message_sent")

    with pytest.raises(PySparkException) as rewritten:
        frame.count()

    assert f"day {FIRST} of the outbox was dropped or rewritten" in str(outbox_spark.reason(rewritten.value))


@without_sources
def test_a_release_without_data_sources_names_what_it_takes(spark: SparkSession) -> None:
    with pytest.raises(
        outbox_spark.SparkReleaseError, match=r"needs Spark 4\.0 or later, and this is Spark 3\..*outbox_spark\.write"
    ):
        outbox_spark.register(spark)
