"""The data source `outbox`: what Spark calls, on the driver and on the executors.

What only the driver does is imported where it is done, since executors may have no psycopg.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from outbox_spark.errors import BatchError, RowError
from outbox_spark.plan import Save, Staged
from outbox_spark.spark_api import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    WriterCommitMessage,
    stream_reader,
)

if TYPE_CHECKING:
    from outbox_spark.result import Result

# Local properties that Spark gives the tasks of a stream; in no documentation (StreamExecution, MicroBatchExecution).
BATCH_ID = "streaming.sql.batchId"
QUERY_ID = "sql.streaming.queryId"


class OutboxDataSource(DataSource):  # type: ignore[misc]  # mypy does not follow pyspark
    """`format("outbox")` of `df.write`, `df.writeStream`, `spark.read` and `spark.readStream`."""

    @classmethod
    def name(cls) -> str:
        return "outbox"

    def writer(self, schema: StructType, overwrite: bool) -> "OutboxWriter":
        """Check all that can be known before a task runs. Spark calls it once a `save()`, on the driver."""
        from outbox_spark.prepare import prepare  # noqa: PLC0415

        save, recognised = prepare(self.options, schema, overwrite=overwrite)
        return OutboxWriter(save, is_recognised=recognised is not None)

    def schema(self) -> str:
        """Return the columns of a read that names no columns. Spark calls it on the driver."""
        from outbox_spark.reading.columns import schema_of  # noqa: PLC0415

        return schema_of(self.options.get("payloadSchema"))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Check options and columns, on the driver."""
        from outbox_spark.reading.plan import plan_read  # noqa: PLC0415
        from outbox_spark.reading.reader import OutboxReader  # noqa: PLC0415

        return OutboxReader(plan_read(self.options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Check options and columns, on the driver."""
        from outbox_spark.reading.plan import plan_read  # noqa: PLC0415
        from outbox_spark.reading.stream import OutboxStreamReader  # noqa: PLC0415

        read = plan_read(self.options, schema, is_stream=True)
        return stream_reader(OutboxStreamReader(read), read.options.limits)

    def streamWriter(self, schema: StructType, overwrite: bool) -> "OutboxStreamWriter":  # noqa: N802  # Spark's name
        """Check as `writer` does. Spark calls it twice a micro-batch: for the tasks, and for the commit."""
        from outbox_spark.prepare import prepare_stream  # noqa: PLC0415

        return OutboxStreamWriter(prepare_stream(self.options, schema, overwrite=overwrite))


@dataclass(frozen=True)
class Attempt(WriterCommitMessage):  # type: ignore[misc]  # mypy does not follow pyspark
    """What a task attempt tells the commit."""

    staged: Staged


class OutboxWriter(DataSourceArrowWriter):  # type: ignore[misc]  # mypy does not follow pyspark
    """One `save()`. Pickled to the executors, connection string and all, as Spark's JDBC source does."""

    def __init__(self, save: Save, *, is_recognised: bool) -> None:
        self._save = save
        self._is_recognised = is_recognised

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Attempt:
        """Stage a partition, or write it; on an executor, and more than once when Spark retries or speculates."""
        from outbox_spark.load import load, refused  # noqa: PLC0415
        from outbox_spark.pieces import write_piece  # noqa: PLC0415

        save, context = self._save, TaskContext.get()
        partition = context.partitionId()
        if self._is_recognised:
            return Attempt(Staged(partition, None, 0))
        _refuse_beyond(save, partition)
        attempt = context.taskAttemptId()
        try:
            if save.pieces is None:
                return Attempt(load(save, iterator, partition=partition, attempt=attempt))
            return Attempt(write_piece(save, save.pieces, iterator, partition=partition, attempt=attempt))
        except RowError as error:
            return Attempt(*refused([save], error, partition=partition))

    def commit(self, messages: list[Attempt | None]) -> None:
        """Write the batch unless the ledger has it; on the driver, when each partition has its one winner."""
        from outbox_spark.commit import commit_batch, commit_pieces  # noqa: PLC0415
        from outbox_spark.prepare import clean_after  # noqa: PLC0415

        save = self._save
        if self._is_recognised:
            clean_after(save)
            return
        if None in messages:
            raise BatchError("Spark asks to commit a batch without all of its partitions; run it again")
        staged = [message.staged for message in messages if message is not None]
        pieces = save.pieces
        result = commit_batch([(save, staged)]) if pieces is None else commit_pieces(save, pieces, staged)
        clean_after(save)
        _say(result, save)

    def abort(self, messages: list[Attempt | None]) -> None:  # noqa: ARG002  # None for each that failed
        """Drop what this `save()` has staged. Pieces that are written stay, and a rerun writes the rest."""
        from outbox_spark.connection import connect  # noqa: PLC0415
        from outbox_spark.prepare import KILLED_WITHIN, drop_attempts  # noqa: PLC0415

        with connect(self._save.info) as connection:
            drop_attempts(connection, self._save.staging, lock_timeout=KILLED_WITHIN)


@dataclass(frozen=True)
class StreamAttempt(WriterCommitMessage):  # type: ignore[misc]  # mypy does not follow pyspark
    """What a task attempt of a stream tells the commit, which another writer makes than the one that it had."""

    staged: Staged
    query: str | None


class OutboxStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]  # mypy does not follow pyspark
    """One micro-batch: the version of its batch is its number, so that a restart from the checkpoint writes it once."""

    def __init__(self, save: Save) -> None:
        self._save = save

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StreamAttempt:
        """Stage a partition of the micro-batch."""
        from outbox_spark.load import load, refused  # noqa: PLC0415

        context = TaskContext.get()
        _refuse_beyond(self._save, context.partitionId())
        number, query = context.getLocalProperty(BATCH_ID), context.getLocalProperty(QUERY_ID)
        # Should Spark name them otherwise one day: ids then tell of this try at the micro-batch, not of the batch.
        version = self._save.token.int >> 65 if number is None else int(number)
        save = self._save.of_micro_batch(version, query)
        partition = context.partitionId()
        try:
            return StreamAttempt(load(save, iterator, partition=partition, attempt=context.taskAttemptId()), query)
        except RowError as error:
            return StreamAttempt(*refused([save], error, partition=partition), query)

    def commit(self, messages: list[StreamAttempt | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """Write the micro-batch unless the ledger has it."""
        from outbox_spark.commit import commit_batch  # noqa: PLC0415
        from outbox_spark.prepare import clean_after  # noqa: PLC0415

        attempts = [message for message in messages if message is not None]
        if len(attempts) < len(messages):
            raise BatchError("Spark asks to commit a micro-batch without all of its partitions; nothing was written")
        query = attempts[0].query if attempts else None
        save = self._save.of_micro_batch(batchId, query)
        result = commit_batch([(save, [attempt.staged for attempt in attempts])])
        clean_after(self._save)
        _say(result, save)

    def abort(self, messages: list[StreamAttempt | None], batchId: int) -> None:  # noqa: ARG002, N803  # Spark's name
        """Drop what its attempts tell of; what others have left goes with the next commit.

        Not all of that name: it may be a query that is refused, and the one that has the name is staging.
        """
        from outbox_spark.connection import connect  # noqa: PLC0415
        from outbox_spark.prepare import drop_tables  # noqa: PLC0415

        tables = [message.staged.table for message in messages if message is not None and message.staged.table]
        with connect(self._save.info) as connection:
            drop_tables(connection, self._save.staging.schema, tables)


def _say(result: "Result", save: Save) -> None:
    from outbox_spark.result import log, refuse_recognised, say  # noqa: PLC0415

    if not log.hasHandlers():
        # Spark commits in a Python process that nobody has configured; what it writes is in the driver's log.
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        log.setLevel(logging.INFO)
    refuse_recognised(result, save.options.on_recognised)
    say(result)


def _refuse_beyond(save: Save, partition: int) -> None:
    most = save.options.most_partitions
    if most is not None and partition >= most:
        raise BatchError(
            f"the DataFrame has more than the {most} partitions that this write takes: "
            f"frame.coalesce({most}) or frame.repartition({most}, ...) gives it fewer"
        )
