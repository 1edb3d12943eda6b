"""A batch as it should be: both tables in one transaction, exact values, order per key."""

import psycopg
from pyspark.sql import SparkSession

import outbox_spark
from tests.spark.frames import counts, invoices, one, save, staging_tables


def test_rows_events_and_ledger_are_written_together(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    save(invoices(spark), options, txnAppId="nightly", txnVersion="7", batchsize="10")

    assert counts(connection) == (100, 100, 1)
    assert staging_tables(connection) == []
    transactions = "SELECT count(DISTINCT xmin::text) FROM (SELECT xmin FROM {} UNION SELECT xmin FROM {}) AS all_of_it"
    assert one(connection, transactions.format("billing.invoice", "outbox.message_pending")) == 1
    batch = outbox_spark.committed(options["url"], "nightly", 7)
    assert batch is not None
    assert (batch.partitions, batch.row_counts) == (4, {"rows": 100, "table": "billing.invoice", "messages": 100})
