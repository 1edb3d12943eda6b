"""Write a DataFrame with its events, by the format or, on Spark 3.5, by the function."""

import os
import subprocess
import sys
from pathlib import Path

import psycopg
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.spark_api import HAS_SOURCES

url = sys.argv[1]
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ.pop("PYSPARK_PYTHON", None)  # register() names this Python, though another one is the path's `python3`
os.environ["PATH"] = "/usr/bin:/bin"
command = Path(sys.executable).with_name("outbox-spark")
jobs = subprocess.run([command], capture_output=True, text=True, check=True).stdout
assert (Path(jobs.strip()) / "archive.py").is_file(), jobs
with psycopg.connect(url) as connection:
    connection.execute("CREATE TABLE invoice (customer_id bigint, amount bigint)")
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
invoices = spark.createDataFrame([(17, 42)], "customer_id bigint, amount bigint")
if HAS_SOURCES:
    outbox_spark.register(spark)
    options = {"dbtable": "invoice", "aggregateType": "customer", "aggregateIdColumn": "customer_id"}
    invoices.write.format("outbox").mode("append").options(url=url, eventType="InvoiceIssued", **options).save()
else:
    names = {"dbtable": "invoice", "aggregate_type": "customer", "aggregate_id_column": "customer_id"}
    outbox_spark.write(invoices, url=url, event_type="InvoiceIssued", **names)
spark.stop()
with psycopg.connect(url) as connection:
    assert connection.execute("SELECT payload ->> 'amount' FROM outbox.message").fetchone() == ("42",)
