"""The data source `outbox`: what Spark calls, on the driver and on the executors.

What only the driver does is imported where it is done, since executors may have no psycopg.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from outbox_spark.errors import BatchError
from outbox_spark.plan import Save, Staged


class OutboxDataSource(DataSource):  # type: ignore[misc]  # mypy does not follow pyspark
    """`df.write.format("outbox").mode("append").options(...).save()`."""

    @classmethod
    def name(cls) -> str:
        return "outbox"

    def writer(self, schema: StructType, overwrite: bool) -> "OutboxWriter":
        """Check all that can be known before a task runs. Spark calls it once a `save()`, on the driver."""
        from outbox_spark.prepare import prepare, say_recognised  # noqa: PLC0415

        save, recognised = prepare(self.options, schema, overwrite=overwrite)
        if recognised is not None:
            say_recognised(recognised)
        return OutboxWriter(save, is_recognised=recognised is not None)


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
        """Stage a partition; on an executor, and more than once when Spark retries or speculates."""
        from outbox_spark.load import load  # noqa: PLC0415

        context = TaskContext.get()
        if self._is_recognised:
            return Attempt(Staged(context.partitionId(), None, 0))
        return Attempt(load(self._save, iterator, partition=context.partitionId(), attempt=context.taskAttemptId()))

    def commit(self, messages: list[Attempt | None]) -> None:
        """Write the batch unless the ledger has it; on the driver, when each partition has its one winner."""
        from outbox_spark.commit import commit_batch  # noqa: PLC0415
        from outbox_spark.prepare import clean_after, say_recognised  # noqa: PLC0415

        save = self._save
        if not self._is_recognised:
            if None in messages:
                raise BatchError("Spark asks to commit a batch without all of its partitions; nothing was written")
            found = commit_batch(save, [message.staged for message in messages if message is not None])
            if found is not None:
                say_recognised(found)
        clean_after(save)

    def abort(self, messages: list[Attempt | None]) -> None:  # noqa: ARG002  # it has None for the failed ones
        """Drop what this `save()` has staged."""
        from outbox_spark.session import connect  # noqa: PLC0415
        from outbox_spark.staging import drop_attempts  # noqa: PLC0415

        with connect(self._save.info) as connection:
            # Longer than Spark takes to kill the Python worker of a task (spark.python.task.killTimeout, 2 s).
            drop_attempts(connection, self._save.staging, patience="10s")
