"""What of the tests a release of Spark cannot run, and the same on each release where PySpark spells it differently."""

import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from outbox_spark.errors import OutboxWriteError
from outbox_spark.spark_api import HAS_LIMITS, HAS_SOURCES, TIME_TYPES

with_sources = pytest.mark.skipif(not HAS_SOURCES, reason='this Spark has no format("outbox")')
without_sources = pytest.mark.skipif(HAS_SOURCES, reason='this Spark has format("outbox")')
with_limits = pytest.mark.skipif(not HAS_LIMITS, reason="this Spark tells no stream how far to go")
without_limits = pytest.mark.skipif(HAS_LIMITS or not HAS_SOURCES, reason="this Spark tells a stream how far to go")
with_time = pytest.mark.skipif(not TIME_TYPES, reason="this Spark has no type TIME")
with_nanoseconds = pytest.mark.skipif(
    tuple(int(number) for number in pyspark.__version__.split(".")[:2]) < (4, 3),
    reason="this Spark has no TIME of more than six digits",
)
without_time = pytest.mark.skipif(bool(TIME_TYPES), reason="this Spark has the type TIME")

# What a failed save() raises: from the driver, Spark wraps what the format raises; the function raises it as it is.
SAVE_FAILS = PySparkException if HAS_SOURCES else (PySparkException, OutboxWriteError)


def arrow_table(frame: DataFrame) -> pa.Table:
    """Return the rows as `toArrow()` does, which Spark 3.5 has not."""
    return frame.toArrow() if HAS_SOURCES else pa.Table.from_batches(frame._collect_as_arrow())


def schema_of(ddl: str) -> StructType:
    """Return the schema as `StructType.fromDDL` does, which Spark 3.5 has not; it takes a session, too."""
    session = SparkSession.getActiveSession()
    assert session is not None
    return session.createDataFrame([], ddl).schema
