"""Writers to which something happens: the executors' processes import them from here."""

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from outbox_spark import OutboxDataSource
from outbox_spark.load import load
from outbox_spark.source import Attempt, OutboxWriter


class FailsAfterLoading(OutboxDataSource):
    """The first attempt at each partition stages its rows, and then its task fails."""

    @classmethod
    def name(cls) -> str:
        return "outbox-fails-after-loading"

    def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
        return _with(super().writer(schema, overwrite), _FailingWriter)


class HasTwins(OutboxDataSource):
    """Of each partition two attempts stage all rows, and either may win."""

    @classmethod
    def name(cls) -> str:
        return "outbox-has-twins"

    def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
        return _with(super().writer(schema, overwrite), _TwinWriter)


class LosesStaging(OutboxDataSource):
    """Between load and commit one staging table loses its rows, as an unlogged one does in a crash."""

    @classmethod
    def name(cls) -> str:
        return "outbox-loses-staging"

    def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
        return _with(super().writer(schema, overwrite), _LosingWriter)


class MeetsTwinDriver(OutboxDataSource):
    """Another driver commits the same batch between this one's look at the ledger and its own commit."""

    @classmethod
    def name(cls) -> str:
        return "outbox-meets-twin-driver"

    def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
        return _with(super().writer(schema, overwrite), _LateWriter)


class MeetsPieces(OutboxDataSource):
    """Another driver begins the same batch in pieces before this one's commit."""

    @classmethod
    def name(cls) -> str:
        return "outbox-meets-pieces"

    def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
        return _with(super().writer(schema, overwrite), _TooLateWriter)


class _FailingWriter(OutboxWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Attempt:
        staged = super().write(iterator)
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("this task fails after it has loaded")
        return staged


class _TwinWriter(OutboxWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Attempt:
        rows = list(iterator)
        context = TaskContext.get()
        mine = super().write(iter(rows))
        twin = load(self._save, rows, partition=context.partitionId(), attempt=context.taskAttemptId() + 1_000_000)
        return mine if context.partitionId() % 2 else Attempt(twin)


class _LosingWriter(OutboxWriter):
    def commit(self, messages: list[Attempt | None]) -> None:
        import psycopg
        from psycopg.sql import SQL, Identifier

        assert messages[2] is not None
        assert messages[2].staged.table is not None
        with psycopg.connect(self._save.info) as connection:
            table = Identifier(self._save.staging.schema, messages[2].staged.table)
            connection.execute(SQL("TRUNCATE {}").format(table))
        super().commit(messages)


class _LateWriter(OutboxWriter):
    def commit(self, messages: list[Attempt | None]) -> None:
        from uuid import uuid4

        import psycopg

        from outbox_spark.ledger import Entry, enter

        options = self._save.options
        with psycopg.connect(self._save.info) as twin:
            entered = enter(
                twin,
                options.outbox_schema,
                app_id=options.app_id,
                version=options.version,
                partitions=1,
                token=uuid4(),
                row_counts={"rows": 0},
            )
            assert entered is Entry.NEW
        super().commit(messages)


class _TooLateWriter(OutboxWriter):
    def commit(self, messages: list[Attempt | None]) -> None:
        from uuid import uuid4

        import psycopg

        from outbox_spark.ledger import begin_pieces

        options = self._save.options
        app_id, version = options.app_id, options.version
        with psycopg.connect(self._save.info) as twin:
            begin_pieces(twin, options.outbox_schema, app_id=app_id, version=version, number=3, token=uuid4(), table="")
        super().commit(messages)


def _with(writer: OutboxWriter, kind: type[OutboxWriter]) -> OutboxWriter:
    return kind(writer._save, is_recognised=writer._is_recognised)
