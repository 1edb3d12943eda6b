"""A separate Spark program, to be killed: `python -m tests.spark.driver '{"url": ..., ...}'`."""

import json
import os
import sys

from pyspark.sql import SparkSession

import outbox_spark
from tests.spark.frames import invoices, save

if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    outbox_spark.register(spark)
    save(invoices(spark), json.loads(sys.argv[1]))
