"""When the events of a batch are due: at once, at a moment that each names, or a number of them a second."""

from datetime import UTC, datetime
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import TimestampNTZType

import outbox_spark
from outbox_spark import OutboxBatch, WriteLimits
from outbox_spark.commit import commit_batch
from outbox_spark.load import load
from outbox_spark.prepare import prepare
from tests.spark.frames import invoices, one, save
from tests.spark.one_row import ROWS, row

Options = dict[str, str]
WAITS = """
    SELECT array_agg(extract(epoch FROM available_at - created_at)::integer ORDER BY id) FROM outbox.message
"""


def test_events_of_all_partitions_become_due_at_the_rate(options: Options, connection: psycopg.Connection) -> None:
    plan, _ = prepare({**options, "rate": "2"}, from_arrow_schema(ROWS), overwrite=False)
    staged = [
        load(plan, [pa.RecordBatch.from_pylist([row(each) for each in numbers], ROWS)], partition=place, attempt=place)
        for place, numbers in enumerate((range(3), range(3, 8)))
    ]

    commit_batch([(plan, staged)])

    assert one(connection, WAITS) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_batch_has_one_rate_for_the_events_of_all_its_frames(
    spark: SparkSession, database_url: str, connection: psycopg.Connection
) -> None:
    events = invoices(spark, 4, partitions=1).select(
        f.lit("customer").alias("aggregate_type"),
        f.col("customer_id").alias("aggregate_id"),
        f.lit("InvoiceIssued").alias("event_type"),
        f.lit("{}").alias("payload"),
    )
    limits = WriteLimits(rate=3)
    with OutboxBatch(spark, url=database_url, app_id="paced", version=1, limits=limits) as batch:
        batch.events(events)
        batch.events(events)

    assert one(connection, WAITS) == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_moment_is_the_same_in_each_time_zone_of_spark(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")  # where 02:30 comes twice on that day
    try:
        frame = invoices(spark, 2).withColumn(
            "due",
            f.expr("timestamp'2031-10-26 00:30:00Z' + make_dt_interval(0, int(invoice_id = 'INV-1'))"),
        )
        save(frame, options, availableAtColumn="due")
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)

    due: dict[str, datetime] = dict(
        connection.execute("SELECT payload->>'invoice_id', available_at FROM outbox.message").fetchall()
    )
    assert due == {
        "INV-0": datetime(2031, 10, 26, 0, 30, tzinfo=UTC),
        "INV-1": datetime(2031, 10, 26, 1, 30, tzinfo=UTC),
    }


def test_a_moment_without_a_time_zone_is_refused(options: Options) -> None:
    columns = from_arrow_schema(ROWS).add("wall_clock", TimestampNTZType())

    with pytest.raises(outbox_spark.OutboxWriteError, match="takes a timestamp, not timestamp_ntz"):
        prepare({**options, "availableAtColumn": "wall_clock"}, columns, overwrite=False)


def test_each_event_names_its_moment(spark: SparkSession, options: Options, connection: psycopg.Connection) -> None:
    frame = invoices(spark, 3).withColumn(
        "due", f.expr("CASE WHEN invoice_id <> 'INV-1' THEN timestamp'2031-05-06 07:08:09.123456Z' END")
    )

    save(frame, options, availableAtColumn="due")

    due: dict[str, datetime] = dict(
        connection.execute("SELECT payload->>'invoice_id', available_at FROM outbox.message").fetchall()
    )
    moment = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    assert due == {"INV-0": moment, "INV-1": None, "INV-2": moment}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rate": "0"}, "option rate takes a whole number from 1 to 1000000, not '0'"),
        ({"rate": "5", "availableAtColumn": "issued_on"}, "options rate and availableAtColumn exclude each other"),
        ({"rate": "5", "singleTask": "true"}, "option rate takes atomic=batch without singleTask"),
        ({"availableAtColumn": "issued_on"}, "'issued_on' of option availableAtColumn takes a timestamp, not date"),
        ({"availableAtColumn": "due"}, "due"),
    ],
)
def test_a_pace_that_cannot_be_is_refused(options: Options, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(outbox_spark.OutboxWriteError, match=words):
        prepare({**options, **changed}, from_arrow_schema(ROWS), overwrite=False)
