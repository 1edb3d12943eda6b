"""What there is to write and to compare, through Spark Connect: `python -m tests.spark.connect '{"url": ..., ...}'`."""

import json
import os
import sys

from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark import OutboxBatch
from tests.spark.frames import invoices, save

if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    options = json.loads(sys.argv[1])
    builder = SparkSession.builder.remote("local[2,3]").config("spark.driver.host", "127.0.0.1")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    outbox_spark.register(spark)
    for _ in range(2):
        save(invoices(spark, 100), options, txnAppId="staged", txnVersion="1")
    pieces = {"atomic": "partition", "numPartitions": "4", "txnAppId": "in pieces", "txnVersion": "1"}
    save(invoices(spark, 200).where("amount >= 100"), options, **pieces)
    with OutboxBatch(spark, url=options["url"], app_id="several", version=1) as batch:
        batch.rows(invoices(spark, 300).where("amount >= 200"), table="billing.invoice")
        made = {"aggregate_type": "customer", "event_type": "InvoiceIssued"}
        batch.events(invoices(spark, 10), function=lambda row: {"payload": {"id": row["invoice_id"]}}, **made)
    found = outbox_spark.differences(invoices(spark, 12), invoices(spark, 10), key_columns=["invoice_id"])
    assert [row.change for row in found.collect()] == ["new", "new"]
    spark.stop()
