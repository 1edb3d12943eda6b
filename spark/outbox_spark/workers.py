"""Which Python the workers run. The only place that asks for the context, which Spark Connect has not."""

import logging
import os
import sys

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

log = logging.getLogger("outbox_spark")


def name_python(spark: SparkSession) -> None:
    """Let workers on this host run this Python, unless PYSPARK_PYTHON or spark.pyspark.python names another."""
    if "PYSPARK_PYTHON" in os.environ:
        return
    try:
        context = spark.sparkContext
    except PySparkException:  # of Spark Connect, whose server has the workers
        return
    named = spark.conf.get("spark.pyspark.python", None)
    if named is None and not context.master.startswith("local"):
        log.warning("outbox: workers run the python3 of their hosts: set PYSPARK_PYTHON to one that has this package")
        return
    # Spark takes it when the session is made, and not from the setting: the workers that plan would have another.
    context.pythonExec = named or sys.executable
