"""DataFrames to write, and what a write has left in the database."""

from collections.abc import Mapping
from typing import Any

import psycopg
from pyspark.sql import DataFrame, SparkSession

import outbox_spark
from outbox_spark.functions import append
from outbox_spark.options import Use, options_of
from outbox_spark.source import OutboxDataSource
from outbox_spark.spark_api import HAS_SOURCES

MADE_INVOICES = """
    SELECT concat('INV-', id) AS invoice_id, concat('C', id % 7) AS customer_id,
        date_add(date'2026-01-01', CAST(id % 28 AS int)) AS issued_on, CAST(id % 5 + 1 AS int) AS quantity,
        CAST(id + 0.11 AS decimal(12, 2)) AS amount
    FROM range(0, {count}, 1, {partitions})
"""
WAITING_FOR_LOCK = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'outbox-spark' AND wait_event_type = 'Lock' AND datname = current_database()
"""
LOADING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'outbox-spark' AND state = 'idle in transaction' AND datname = current_database()
"""
REFUSE_NEW_TABLES = """
    CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'a table is made'; END $$;
    CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION refuse();
"""


def invoices(spark: SparkSession, count: int = 100, *, partitions: int = 4) -> DataFrame:
    """Make that many rows of billing.invoice, of seven customers, in that many partitions."""
    return spark.sql(MADE_INVOICES.format(count=count, partitions=partitions))


def save(frame: DataFrame, options: Mapping[str, str], *, source: str = "outbox", **changed: str) -> None:
    """Append the frame with these options, some of them changed; where Spark has no sources, by the function."""
    given = {**options, **changed}
    if HAS_SOURCES:
        frame.write.format(source).mode("append").options(**given).save()
    elif source == "outbox":
        outbox_spark.write(frame, **in_python(given))
    else:
        (kind,) = (kind for kind in OutboxDataSource.__subclasses__() if kind.name() == source)
        append(frame, kind(given).writer(frame.schema, overwrite=False))


def read(spark: SparkSession, url: str, *, schema: str | None = None, **options: str) -> DataFrame:
    """Read the outbox with these options; where Spark has no sources, by the function."""
    if HAS_SOURCES:
        return spark.read.format("outbox").options(url=url, **options).load(schema=schema)
    return outbox_spark.read(spark, url=url, schema=schema, **in_python(options, Use.READ))


def register(spark: SparkSession, source: type[OutboxDataSource]) -> None:
    """Make a source known to Spark, where there are sources."""
    if HAS_SOURCES:
        spark.dataSource.register(source)


def in_python(options: Mapping[str, str], use: Use = Use.WRITE) -> dict[str, str]:
    """Return options by the names of their parameters."""
    parameters = {name.lower(): option.parameter for name, option in options_of(use).items()}
    return {parameters[name.lower()]: value for name, value in options.items()}


def counts(connection: psycopg.Connection) -> tuple[int, int, int]:
    """Return how many invoices, messages and ledger rows there are."""
    return (
        one(connection, "SELECT count(*) FROM billing.invoice"),
        one(connection, "SELECT count(*) FROM outbox.message"),
        one(connection, "SELECT count(*) FROM outbox.batch"),
    )


def staging_tables(connection: psycopg.Connection) -> list[str]:
    """Return the staging tables that are left."""
    found = connection.execute(r"SELECT relname FROM pg_class WHERE relname LIKE 'staging\_%' AND relkind = 'r'")
    return [name for (name,) in found]


def one(connection: psycopg.Connection, query: str) -> Any:
    """Return the only value of a query."""
    ((value,),) = connection.execute(query).fetchall()
    return value
