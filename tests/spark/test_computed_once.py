"""A DataFrame of a batch is computed once, so that rows and events agree whatever its values come from."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import outbox_spark
from outbox_spark import Events, OutboxBatch
from tests.spark.frames import counts, one, staging_tables

TABLES = """
    CREATE TABLE billing.order (order_id text PRIMARY KEY, made_at timestamptz);
    CREATE TABLE billing.order_log (order_id text REFERENCES billing.order, made_at timestamptz)
"""
AGREE = """
    SELECT count(*) FROM billing.order JOIN outbox.message
        ON payload->>'order_id' = order_id AND (payload->>'made_at')::timestamptz = made_at
"""
SAME: dict[str, Any] = {"aggregate_type": "order", "event_type": "Ordered"}


@pytest.fixture
def named(database_url: str, connection: psycopg.Connection) -> dict[str, Any]:
    """What names a batch; its database has two tables."""
    connection.execute(TABLES)
    return {"url": database_url, "app_id": "orders", "version": 1}


def orders(spark: SparkSession) -> DataFrame:
    """Return 100 orders with ids of a Python function and the time: both differ each time that they are computed."""
    made = f.udf(lambda: str(uuid4()))
    return spark.range(0, 100, 1, 4).select(made().alias("order_id"), f.current_timestamp().alias("made_at"))


def of_columns() -> dict[str, Any]:
    """Return what makes events with Spark."""
    return {**SAME, "aggregate_id": f.col("order_id"), "payload": f.struct("order_id", "made_at")}


def of_function(row: dict[str, Any]) -> dict[str, Any]:
    """Return the event of a row."""
    return {"aggregate_id": row["order_id"], "payload": {**row, "made_at": row["made_at"].isoformat()}}


def rows_then_events(batch: OutboxBatch, frame: DataFrame) -> None:
    batch.rows(frame, table="billing.order")
    batch.events(frame, **of_columns())


def events_then_rows(batch: OutboxBatch, frame: DataFrame) -> None:
    batch.events(frame, **of_columns())
    batch.rows(frame, table="billing.order")


def rows_with_events(batch: OutboxBatch, frame: DataFrame) -> None:
    batch.rows(frame, table="billing.order", events=Events(**of_columns()))


def events_of_a_function(batch: OutboxBatch, frame: DataFrame) -> None:
    batch.rows(frame, table="billing.order", events=Events(function=of_function, **SAME))


def events_in_an_order(batch: OutboxBatch, frame: DataFrame) -> None:
    batch.rows(frame, table="billing.order")
    batch.events(frame, order_by=["order_id"], **of_columns())


def events_of_another(batch: OutboxBatch, frame: DataFrame) -> None:
    batch.rows(frame, table="billing.order")
    batch.events(frame.filter("order_id IS NOT NULL"), **of_columns())


def two_tables(batch: OutboxBatch, frame: DataFrame) -> None:
    rows_then_events(batch, frame)
    batch.rows(frame, table="billing.order_log")


@pytest.mark.parametrize(
    "add",
    [rows_then_events, events_then_rows, rows_with_events, events_of_a_function, events_in_an_order, two_tables],
    ids=lambda add: add.__name__,
)
def test_rows_and_events_of_a_dataframe_agree(
    add: Callable[[OutboxBatch, DataFrame], None],
    spark: SparkSession,
    named: dict[str, Any],
    connection: psycopg.Connection,
) -> None:
    with OutboxBatch(spark, **named) as batch:
        add(batch, orders(spark))

    assert one(connection, AGREE) == 100
    assert one(connection, "SELECT count(*) FROM outbox.message") == 100
    assert staging_tables(connection) == []


def test_events_of_columns_take_no_other_column_of_the_dataframe(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    row = "SELECT 'a' AS order_id, timestamp'2026-01-01' AS made_at, make_interval(1) AS for_how_long, 1 AS twice"
    frame = spark.sql(row).select("*", f.lit(2).alias("twice"))

    with OutboxBatch(spark, **named) as batch:
        batch.events(frame, order_by=["order_id"], **of_columns())
        batch.events(frame.select("order_id"), **{**of_columns(), "payload": f.lit("{}")})

    assert one(connection, "SELECT array_agg(aggregate_id) FROM outbox.message") == ["a", "a"]


def test_the_events_of_a_key_follow_the_calls_whichever_dataframe_they_are_of(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    first, second = orders(spark).limit(1), orders(spark).limit(1)
    event = {"aggregate_type": "order", "aggregate_id": f.lit("1"), "payload": f.lit("{}")}

    with OutboxBatch(spark, **named) as batch:
        batch.rows(first, table="billing.order")
        batch.rows(second, table="billing.order")
        batch.events(second, event_type="A", **event)
        batch.events(first, event_type="B", **event)
        batch.events(second, event_type="C", **event)

    assert one(connection, "SELECT string_agg(event_type, '' ORDER BY id) FROM outbox.message") == "ABC"
    assert one(connection, "SELECT count(DISTINCT message_id) FROM outbox.message") == 3


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda frame: frame.withColumn("order_id", f.udf(lambda: str(uuid4()))()), "a Python function"),
        (lambda frame: frame.withColumn("order_id", f.upper(f.udf(lambda: str(uuid4()))())), "a Python function"),
        (lambda frame: frame.withColumn("order_id", f.expr("uuid()")), r"uuid\(\)"),
        (lambda frame: frame.withColumn("made_at", f.current_timestamp()), r"current_timestamp\(\)"),
        (lambda frame: frame.mapInPandas(lambda rows: rows, frame.schema), "a Python function"),
    ],
    ids=["function", "inside", "uuid", "time", "pandas"],
)
def test_two_dataframes_made_of_one_that_may_differ_are_refused(
    step: Callable[[DataFrame], DataFrame],
    what: str,
    spark: SparkSession,
    named: dict[str, Any],
    connection: psycopg.Connection,
) -> None:
    rows = spark.sql("SELECT 'a' AS order_id, timestamp'2026-01-01' AS made_at")
    frame = step(rows)

    with (
        pytest.raises(outbox_spark.BatchError, match=rf"are made of one.*again: {what}\. .*localCheckpoint"),
        OutboxBatch(spark, **named) as batch,
    ):
        events_of_another(batch, frame)
    kept = frame.localCheckpoint()
    with OutboxBatch(spark, **named) as batch:
        events_of_another(batch, kept)

    assert counts(connection)[1:] == (1, 1)
    assert one(connection, AGREE) == 1


def test_two_dataframes_made_of_one_that_is_always_the_same_are_taken(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    frame = spark.range(3).selectExpr("CAST(id AS string) AS order_id", "1 AS n").groupBy("order_id").sum()
    made_now = f.current_timestamp().alias("made_at")

    with OutboxBatch(spark, **named) as batch:
        batch.rows(frame.select("order_id", made_now), table="billing.order")
        batch.events(frame.select(f.col("order_id").alias("aggregate_id"), f.lit("{}").alias("payload")), **SAME)

    assert one(connection, "SELECT count(*) FROM billing.order JOIN outbox.message ON aggregate_id = order_id") == 3


def test_events_of_a_dataframe_take_one_order(spark: SparkSession, named: dict[str, Any]) -> None:
    frame = orders(spark)

    with OutboxBatch(spark, **named) as batch:
        batch.events(frame, order_by=["order_id"], **of_columns())
        with pytest.raises(outbox_spark.OptionError, match="order_by differs"):
            batch.events(frame, order_by=["made_at"], **of_columns())
