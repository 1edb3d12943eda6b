"""What differs between the releases of Spark. This module alone asks which names PySpark has.

| what                                             | 3.5     | 4.0     | 4.1     | 4.2, 4.3 |
|--------------------------------------------------|---------|---------|---------|----------|
| Python data sources: `format("outbox")`          | refused | yes     | yes     | yes      |
| the writer of a stream gets Arrow batches        | -       | bridged | yes     | yes      |
| the reader of a stream is told where it stands   | -       | bridged | bridged | yes      |
| a stream's limits, and how far a trigger goes    | -       | refused | refused | yes      |
| the type TIME                                    | missing | missing | yes     | yes      |
| tags of a classic session's jobs                 | bridged | yes     | yes     | yes      |
| a time zone for `to_arrow_schema`                | is UTC  | is UTC  | is UTC  | asked    |

Where the type is missing, a column `time` takes a string, as one does that no type of Spark's fits.
Names are looked for, not numbers: a vendor's release may carry parts of a later one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, types
from pyspark.sql.pandas.types import to_arrow_schema

from outbox_spark.errors import OptionError, SparkReleaseError

HERE = f"this is Spark {pyspark.__version__}"
TIME_TYPES: tuple[type[types.DataType], ...] = tuple(
    getattr(types, name) for name in ("TimeType",) if hasattr(types, name)
)

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        InputPartition,
        WriterCommitMessage,
    )

    HAS_SOURCES = True
except ImportError:
    # Stand-ins: the functions write() and read() take the same steps, without Spark calling them.
    class DataSource:  # type: ignore[no-redef]
        def __init__(self, options: Mapping[str, str]) -> None:
            self.options = options

    class DataSourceArrowWriter: ...  # type: ignore[no-redef]

    class DataSourceReader: ...  # type: ignore[no-redef]

    class DataSourceStreamReader: ...  # type: ignore[no-redef]

    class DataSourceStreamWriter: ...  # type: ignore[no-redef]

    class InputPartition: ...  # type: ignore[no-redef]

    class WriterCommitMessage: ...  # type: ignore[no-redef]

    HAS_SOURCES = False

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:
    # Spark 4.0 asks a writer alone whether it takes Arrow batches, not what it writes (write_into_data_source.py).
    class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):  # type: ignore[no-redef, misc]
        ...


try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

    HAS_LIMITS = True
except ImportError:

    class ReadLimit: ...  # type: ignore[no-redef]

    class ReadAllAvailable(ReadLimit): ...  # type: ignore[no-redef, misc]

    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef, misc]
        def __init__(self, max_rows: int) -> None:
            self.max_rows = max_rows

    class SupportsTriggerAvailableNow: ...  # type: ignore[no-redef]

    HAS_LIMITS = False

__all__ = [
    "HAS_LIMITS",
    "HAS_SOURCES",
    "TIME_TYPES",
    "DataSource",
    "DataSourceArrowWriter",
    "DataSourceReader",
    "DataSourceStreamArrowWriter",
    "DataSourceStreamReader",
    "InputPartition",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "Remembering",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
    "arrow_schema",
    "described",
    "interrupted_on_error",
    "require_sources",
    "stream_reader",
]


def require_sources() -> None:
    """Raise SparkReleaseError when this release has no Python data sources."""
    if not HAS_SOURCES:
        raise SparkReleaseError(
            f'format("outbox") needs Spark 4.0 or later, and {HERE}: use outbox_spark.write(frame, ...), '
            "outbox_spark.read(spark, ...) and OutboxBatch, and foreach_batch for a stream"
        )


def arrow_schema(schema: types.StructType) -> pa.Schema:
    """Return the schema of the Arrow batches that Spark takes for these columns, with instants in UTC."""
    zone = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)


def stream_reader(reader: DataSourceStreamReader, limits: Sequence[str]) -> DataSourceStreamReader:
    """Return the reader as this release calls it.

    Args:
        limits: the options that limit a micro-batch.
    Raises:
        OptionError: this release cannot hold them. `Trigger.AvailableNow` would end after the first micro-batch.
    """
    if HAS_LIMITS:
        return reader
    if limits:
        raise OptionError(
            "; ".join(f"option {name} needs Spark 4.2 or later, and {HERE}: leave it out" for name in limits)
        )
    return Remembering(reader)


class Remembering(DataSourceStreamReader):  # type: ignore[misc]  # mypy does not follow pyspark
    """A reader that is asked for its latest offset, and is not told from where: it remembers.

    Spark asks for the rows of each micro-batch before it asks how far the next one goes. At a restart it asks for those
    of the last offset in the checkpoint first (`PythonMicroBatchStream.setLatestSeenOffset`).
    """

    def __init__(self, reader: DataSourceStreamReader) -> None:
        self._reader = reader
        self._first: dict[str, Any] | None = None
        self._start: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        if self._first is None:
            self._first = self._reader.initialOffset()
        return self._first

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        start = self.initialOffset() if self._start is None else self._start
        latest: dict[str, Any] = self._reader.latestOffset(start, ReadAllAvailable())
        return latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._start = end
        tasks: Sequence[InputPartition] = self._reader.partitions(start, end)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows: Iterator[pa.RecordBatch] = self._reader.read(partition)
        return rows


@contextmanager
def interrupted_on_error(spark: SparkSession) -> Iterator[None]:
    """Interrupt the jobs that this thread has started in the block, when the block raises."""
    add, interrupt, remove = _tagging(spark)
    tag = f"outbox-{uuid4()}"
    add(tag)
    try:
        yield
    except BaseException:
        with suppress(Exception):  # what has gone wrong may be Spark itself, and is what the caller is to hear of
            interrupt(tag)  # the tasks of a job that is not waited for any more
        raise
    finally:
        remove(tag)


@contextmanager
def described(spark: SparkSession, words: str) -> Iterator[None]:
    """Name the jobs of this block on Spark's web page, unless the user has; Spark Connect has no such name."""
    context = getattr(spark, "sparkContext", None)
    if context is None or context.getLocalProperty("spark.job.description") is not None:
        yield
        return
    context.setJobDescription(words)
    try:
        yield
    finally:
        context.setJobDescription(None)


def _tagging(spark: SparkSession) -> tuple[Callable[[str], object], Callable[[str], object], Callable[[str], object]]:
    # In 3.5 these methods of a session are for Spark Connect alone; where there is a context, it has them.
    if not HAS_SOURCES:
        with suppress(PySparkException):
            context = spark.sparkContext
            return context.addJobTag, context.cancelJobsWithTag, context.removeJobTag
    return spark.addTag, spark.interruptTag, spark.removeTag
