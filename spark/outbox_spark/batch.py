"""Several DataFrames in one transaction: rows of as many tables as you like, and separate events.

Every table and column is checked when it is named. At the end every DataFrame is staged by its own Spark job, and one
transaction moves all of them, as that of a `save()` does.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal
from uuid import uuid4

import psycopg
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_spark.commit import commit_batch
from outbox_spark.connection import connect, conninfo
from outbox_spark.errors import BatchError, OptionError, OutboxWriteError
from outbox_spark.events import MakeEvents, made_by
from outbox_spark.ledger import Batch, count_repeat, read, refuse_begun_in_pieces
from outbox_spark.load import load
from outbox_spark.options import WriteLimits, batch_options
from outbox_spark.plan import Plan, Save, Staged
from outbox_spark.prepare import (
    KILLED_WITHIN,
    clean_after,
    clean_before,
    drop_attempts,
    make_pattern,
    name_staging,
    room_of,
    say_recognised,
)
from outbox_spark.tables import EVENT_FIELDS, EVENT_TEXTS, MESSAGE_KEY, describe, plan_events, plan_rows, require_outbox


class OutboxBatch:
    """A batch that is written at the end of its block: all of it or nothing, and once.

        with OutboxBatch(spark, url=url, app_id="nightly", version=20261121) as batch:
            batch.rows(invoices, table="billing.invoice")
            batch.rows(customers, table="billing.customer", mode="upsert", key_columns=["customer_id"])
            batch.events(invoices, aggregate_type="customer", aggregate_id=col("customer_id"),
                         event_type="InvoiceIssued", payload=struct("invoice_id", "amount"))

    When the block raises, nothing is written. `recognised` is the committed batch of that name, if there is one: then
    the block writes nothing either.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        url: str,
        app_id: str,
        version: int,
        user: str | None = None,
        password: str | None = None,
        limits: WriteLimits = WriteLimits(),  # noqa: B008  # frozen
        outbox_schema: str = "outbox",
        staging_schema: str | None = None,
    ) -> None:
        """Name the batch and its database.

        Args:
            limits: how much is written at a time, and when it waits.
        Raises:
            OptionError: it cannot be, with every fault at once.
        """
        self._spark = spark
        self._options = batch_options(
            limits,
            url=url,
            app_id=app_id,
            version=version,
            user=user,
            password=password,
            outbox_schema=outbox_schema,
            staging_schema=staging_schema,
        )
        self._info = conninfo(url, user, password)
        self._is_open = False
        self.recognised: Batch | None = None

    def __enter__(self) -> "OutboxBatch":
        if self._is_open:
            raise BatchError("the batch is open already: its block is written when it ends, and takes no other inside")
        # Of a block that failed nothing is left: opened again, it would write its DataFrames twice.
        self._token = uuid4()
        self._frames: list[tuple[DataFrame, Plan]] = []
        options = self._options
        with connect(self._info) as connection:
            self._now = require_outbox(connection, options)
            self.recognised = read(connection, options.outbox_schema, options.app_id, options.version)
            if self.recognised is None:
                refuse_begun_in_pieces(connection, options.outbox_schema, options.app_id, options.version)
            else:
                count_repeat(connection, options.outbox_schema, app_id=options.app_id, version=options.version)
                say_recognised(self.recognised)
        self._is_open = True
        return self

    def rows(
        self,
        frame: DataFrame,
        *,
        table: str,
        mode: Literal["append", "upsert"] = "append",
        key_columns: Sequence[str] = (),
    ) -> None:
        """Add a DataFrame whose rows belong to a table.

        Args:
            mode: "upsert" updates the rows that are there with the same `key_columns`, which need a unique index.
        Raises:
            BatchError: it is added outside of the block.
            OptionError, TableError, ColumnError: it cannot be written there, and why.
        """
        self._require_open()
        if mode not in {"append", "upsert"}:
            raise OptionError(f"mode takes 'append' or 'upsert', not {mode!r}")
        if (mode == "upsert") != bool(key_columns):
            raise OptionError("mode upsert takes key_columns, and append takes no key_columns")
        with connect(self._info) as connection:
            described = describe(connection, table, named_by="rows()")
        self._frames.append((self._bounded(frame), plan_rows(frame.schema, described, tuple(key_columns))))

    def events(
        self,
        frame: DataFrame,
        *,
        function: MakeEvents | None = None,
        struct: str | None = None,
        message_key: Column | None = None,
        order_by: Sequence[Column | str] = (),
        **fields: Column | str,
    ) -> None:
        """Add a DataFrame whose rows become events.

        What an event consists of is named as in outbox.message: aggregate_type, aggregate_id, event_type, payload,
        headers, exchange, routing_key, content_type, message_id. Without more the DataFrame's columns are these.

        Args:
            fields: each a text that all events have, or a Column; then no other column of the DataFrame is taken.
            function: makes the event, several or `None` of a row, which it gets as a dict.
            struct: the column that has an event's fields inside.
            message_key: message ids follow from it and from type and key of the event, not from the batch. So consumers
                know an event that comes again in another batch.
            order_by: orders the events over all partitions; else a partition's are in the DataFrame's order.
        Raises:
            BatchError: it is added outside of the block.
            OptionError, ColumnError: with every fault at once.
        """
        self._require_open()
        given = {**fields, **({} if message_key is None else {MESSAGE_KEY: message_key})}
        if unknown := given.keys() - set(EVENT_FIELDS):
            raise OptionError(f"an event has {', '.join(EVENT_FIELDS)}, not {', '.join(sorted(unknown))}")
        same = {name: value for name, value in given.items() if name in EVENT_TEXTS and isinstance(value, str)}
        columns = [
            (f.lit(value) if isinstance(value, str) else value).alias(name)
            for name, value in given.items()
            if name not in same
        ]
        if (function is not None) + (struct is not None) + bool(columns) > 1:
            raise OptionError("function, struct and Columns exclude each other: each gives all that differs in rows")
        frame = self._bounded(frame, order_by)
        if function is not None:
            frame = made_by(
                function, frame, [name for name in EVENT_FIELDS if name not in same and name != MESSAGE_KEY]
            )
        elif struct is not None:
            frame = frame.select(f"{struct}.*")
        elif columns:
            frame = frame.select(*columns)
        plan = plan_events(frame.schema, same, number=sum(plan.event is not None for _, plan in self._frames))
        self._frames.append((frame, plan))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if error is not None or self.recognised is not None:
            return
        if not self._frames:
            raise BatchError(
                "the block has added no DataFrame, and the batch is not in the ledger: add one, which may be empty, "
                "with rows() or events()"
            )
        self._write()

    def _require_open(self) -> None:
        if not self._is_open:
            raise BatchError(
                "rows() and events() add to a batch that is open: call them inside of `with OutboxBatch(...) as batch:`"
            )

    def _write(self) -> None:
        saves = self._begin()
        tag = f"outbox-{self._token}"
        self._spark.addTag(tag)
        try:
            frames = [frame for frame, _ in self._frames]
            written = [(save, _stage(save, frame)) for save, frame in zip(saves, frames, strict=True)]
            self.recognised = commit_batch(written)
        except BaseException:
            with suppress(Exception):  # what has gone wrong may be Spark itself, and is what the caller is to hear of
                self._spark.interruptTag(tag)  # the tasks of a job that is not waited for any more
            self._give_up(saves)
            raise
        finally:
            self._spark.removeTag(tag)
        if self.recognised is not None:
            say_recognised(self.recognised)
        for save in saves:
            clean_after(save)

    def _begin(self) -> list[Save]:
        options, saves = self._options, []
        with connect(self._info) as connection:
            clean_before(connection, options, self._now)
            for _, plan in self._frames:
                staging = name_staging(
                    options.staging_schema, now=self._now, batch_hash=options.batch_hash, token=uuid4()
                )
                make_pattern(connection, staging, plan)
                saves.append(Save(self._token, self._info, options, plan, staging, room=room_of(options)))
        return saves

    def _give_up(self, saves: Sequence[Save]) -> None:
        with suppress(OutboxWriteError, psycopg.Error), connect(self._info) as connection:  # else they go by age
            for save in saves:
                drop_attempts(connection, save.staging, lock_timeout=KILLED_WITHIN)

    def _bounded(self, frame: DataFrame, order_by: Sequence[Column | str] = ()) -> DataFrame:
        most = self._options.num_partitions
        if order_by and most is not None:
            return frame.repartitionByRange(most, *order_by).sortWithinPartitions(*order_by)
        if order_by:
            return frame.orderBy(*order_by)  # the partitions follow each other in that order
        return frame if most is None else frame.coalesce(most)


def _stage(save: Save, frame: DataFrame) -> list[Staged]:
    """Stage a DataFrame; of the attempts at a task Spark hands back what the winner says."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        staged = load(save, batches, partition=context.partitionId(), attempt=context.taskAttemptId())
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([staged.partition], pa.int32()),
                pa.array([staged.table], pa.string()),
                pa.array([staged.rows], pa.int64()),
                pa.array([staged.is_left_out]),
            ],
            ["place", "relation", "row_count", "left_out"],
        )

    told = frame.mapInArrow(stage, "place int, relation string, row_count long, left_out boolean").collect()
    return [Staged(place, table, rows, is_left_out=left_out) for place, table, rows, left_out in told]
