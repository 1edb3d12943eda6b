"""Write and read by functions, on every release of Spark: 3.5 has no `format("outbox")`.

They take the steps that Spark takes for a Python data source, with the same writer and reader. The driver plans, the
executors run in mapInArrow, and the driver commits what the winning attempts have told.
"""

import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from outbox_spark.asked import as_given_to_spark
from outbox_spark.errors import OutboxWriteError
from outbox_spark.options import Use
from outbox_spark.source import OutboxDataSource, OutboxWriter
from outbox_spark.spark_api import interrupted_on_error
from outbox_spark.workers import name_python


def write(frame: DataFrame, **options: Any) -> None:
    """Append the DataFrame as `frame.write.format("outbox")` does.

        outbox_spark.write(
            invoices, url="postgresql://user@host/database", dbtable="billing.invoice", aggregate_type="customer",
            aggregate_id_column="customer_id", event_type="InvoiceIssued", app_id="nightly-invoices", version=20261121,
        )

    Args:
        options: those of the format, in Python's spelling: `app_id` and `version` are txnAppId and txnVersion.
    Raises:
        OptionError, TableError, ColumnError: with every fault at once, before any task runs.
        BatchError, CommitUnknownError: as the format says them; what fails a task comes in a PySparkException.
    """
    name_python(frame.sparkSession)
    source = OutboxDataSource(as_given_to_spark(Use.WRITE, options))
    append(frame, source.writer(frame.schema, overwrite=False))


def append(frame: DataFrame, writer: OutboxWriter) -> None:
    """Do with a writer what Spark does with one that a data source has made."""

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        attempt = pickle.dumps(writer.write(batches))
        yield pa.RecordBatch.from_pydict({"attempt": pa.array([attempt], pa.binary())})

    try:
        with interrupted_on_error(frame.sparkSession):
            told = frame.mapInArrow(write_partition, "attempt binary").collect()
            writer.commit([pickle.loads(attempt) for (attempt,) in told])  # noqa: S301  # made above
    except BaseException:
        with suppress(OutboxWriteError):  # else the staging tables go by age
            writer.abort([])
        raise


def read(spark: SparkSession, *, schema: StructType | str | None = None, **options: Any) -> DataFrame:
    """Return the rows of the outbox as `spark.read.format("outbox").load(schema=schema)` does.

    All that is planned is planned here: each query of the DataFrame sees the rows that were sent before this call.

    Args:
        schema: the columns; without it those that the format has.
        options: those of the format, in Python's spelling.
    Raises:
        OptionError, TableError, ColumnError: with every fault at once.
        ReadError: the database cannot give what is asked for.
    """
    name_python(spark)
    source = OutboxDataSource(as_given_to_spark(Use.READ, options))
    empty = spark.createDataFrame([], source.schema() if schema is None else schema)
    reader = source.reader(empty.schema)
    tasks = reader.partitions()
    if not tasks:
        return empty

    def read_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        list(batches)  # the number that the partition is made of
        yield from reader.read(tasks[TaskContext.get().partitionId()])

    return spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(read_partition, empty.schema)
