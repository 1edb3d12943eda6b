"""Several DataFrames in one transaction: rows of as many tables as you like, and separate events.

Every table and column is checked when it is named. At the end a Spark job stages each DataFrame, which it computes
once for all that is made of it. One transaction moves everything, as that of a `save()` does.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Literal
from uuid import uuid4

import psycopg
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession

from outbox_spark.asked import WriteLimits, batch_options, row_options
from outbox_spark.commit import commit_batch
from outbox_spark.connection import connect, conninfo
from outbox_spark.errors import BatchError, OutboxWriteError, RowError
from outbox_spark.frames import Events, Frames
from outbox_spark.ledger import Batch, read, refuse_begun_in_pieces
from outbox_spark.load import load_all, refused
from outbox_spark.plan import MakeEvents, Save, Staged
from outbox_spark.prepare import (
    KILLED_WITHIN,
    clean_after,
    clean_before,
    drop_attempts,
    make_pattern,
    name_staging,
    recognise,
    room_of,
)
from outbox_spark.result import Result, refuse_recognised, say
from outbox_spark.spark_api import described, interrupted_on_error
from outbox_spark.tables import describe, plan_rows, require_noting, require_outbox, require_quarantine
from outbox_spark.volatile import refuse_computed_twice


class OutboxBatch:
    """A batch that is written at the end of its block: all of it or nothing, and once.

        with OutboxBatch(spark, url=url, app_id="nightly", version=20261121) as batch:
            batch.rows(customers, table="billing.customer", upsert_keys=["customer_id"])
            batch.rows(invoices, table="billing.invoice")
            batch.events(invoices, aggregate_type="customer", aggregate_id=col("customer_id"),
                         event_type="InvoiceIssued", payload=struct("invoice_id", "amount"))

    When the block raises, nothing is written. `recognised` is the committed batch of that name, if there is one: then
    the block writes nothing either. Behind the block `result` tells which of both was done, and the counts.
    """

    def __init__(  # noqa: PLR0913  # as many as there are options
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
        on_recognised: Literal["skip", "fail"] = "skip",
    ) -> None:
        """Name the batch and its database.

        Args:
            limits: how much is written at a time, and when it waits.
            on_recognised: "fail" raises BatchError where the ledger has the batch already.
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
            on_recognised=on_recognised,
        )
        self._info = conninfo(url, user, password)
        self._is_open = False
        self.recognised: Batch | None = None
        self.result: Result | None = None

    def __enter__(self) -> "OutboxBatch":
        if self._is_open:
            raise BatchError("the batch is open already: its block is written when it ends, and takes no other inside")
        # Of a block that failed nothing is left: opened again, it would write its DataFrames twice.
        self._token = uuid4()
        self._frames = Frames()
        self.result = None
        options = self._options
        with connect(self._info) as connection:
            self._now = require_outbox(connection, options)
            self.recognised = read(connection, options.outbox_schema, options.app_id, options.version)
            if self.recognised is None:
                refuse_begun_in_pieces(connection, options.outbox_schema, options.app_id, options.version)
            else:
                self.result = Result.recognised(self.recognised)
                recognise(connection, options, self.recognised)
        self._is_open = True
        return self

    def rows(  # noqa: PLR0913  # as many as there are options
        self,
        frame: DataFrame,
        *,
        table: str,
        upsert_keys: Sequence[str] = (),
        only_changed: bool = False,
        if_absent: bool = False,
        delete_column: str | None = None,
        bad_rows: Literal["fail", "quarantine"] = "fail",
        bad_rows_table: str | None = None,
        max_bad_rows: int = 100,
        events: Events | None = None,
    ) -> None:
        """Add a DataFrame whose rows belong to a table.

        Args:
            upsert_keys: columns with a unique index; a row that is there with these is updated.
            only_changed: a row that does not differ stays, without any of the `events`.
            if_absent: a row that is there stays, without any of the `events`.
            delete_column: a column of booleans; where it is true, the row is deleted.
            bad_rows: "quarantine" writes rows that no table takes into `bad_rows_table`, without any event.
            max_bad_rows: more of this DataFrame fail the batch.
            events: what events the rows become. Without `only_changed`, `if_absent` and `delete_column` it is the same
                as a call of `events()`.
        Raises:
            BatchError: it is added outside of the block.
            OptionError, TableError, ColumnError: it cannot be written there, and why.
        """
        self._require_open()
        options = row_options(
            upsert_keys=upsert_keys,
            only_changed=only_changed,
            if_absent=if_absent,
            delete_column=delete_column,
            bad_rows=bad_rows,
            bad_rows_table=bad_rows_table,
            max_bad_rows=max_bad_rows,
        )
        with connect(self._info) as connection:
            plan = plan_rows(frame.schema, describe(connection, table, named_by="rows()"), options)
            quarantine = require_quarantine(
                connection, options, columns=len(frame.columns), named_by="bad_rows_table of rows()"
            )
            if plan.passes_over:
                require_noting(connection, self._options)
        self._frames.add_rows(frame, replace(plan, quarantine=quarantine), events)

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
        """Add a DataFrame whose rows become events; the arguments are those of `Events`.

        Raises:
            BatchError: it is added outside of the block.
            OptionError, ColumnError: with every fault at once.
        """
        self._require_open()
        self._frames.add_events(
            frame,
            Events(function=function, struct=struct, message_key=message_key, order_by=order_by, **fields),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if error is not None or self.recognised is not None:
            return
        if not self._frames.frames:
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
        refuse_computed_twice([frame.given for frame in self._frames.frames])
        saves = self._begin()
        try:
            with interrupted_on_error(self._spark):
                result = commit_batch(list(zip(saves, self._stage(saves), strict=True)))
        except BaseException:
            self._give_up(saves)
            raise
        self.result, self.recognised = result, result.batch
        for save in saves:
            clean_after(save)
        refuse_recognised(result, self._options.on_recognised)
        say(result)

    def _begin(self) -> list[Save]:
        options, saves = self._options, []
        with connect(self._info) as connection:
            clean_before(connection, options, self._now)
            for plan in self._frames.plans():
                staging = name_staging(
                    options.staging_schema, now=self._now, batch_hash=options.batch_hash, token=uuid4()
                )
                make_pattern(connection, staging, plan)
                saves.append(Save(self._token, self._info, options, plan, staging, room=room_of(options)))
        return saves

    def _stage(self, saves: Sequence[Save]) -> list[list[Staged]]:
        """Compute each DataFrame once; return what is staged for each plan."""
        staged: list[list[Staged]] = [[] for _ in saves]
        for frame in self._frames.frames:
            computed = frame.computed(self._options.num_partitions)
            of_frame = [saves[part] for part in frame.parts]
            into = " and ".join(str(save.plan) for save in of_frame)
            with described(self._spark, f"batch {self._options.app_id} {self._options.version}: stage {into}"):
                for number, each in _stage(computed, of_frame):
                    staged[frame.parts[number]].append(each)
        return staged

    def _give_up(self, saves: Sequence[Save]) -> None:
        with suppress(OutboxWriteError, psycopg.Error), connect(self._info) as connection:  # else they go by age
            for save in saves:
                drop_attempts(connection, save.staging, lock_timeout=KILLED_WITHIN)


def _stage(frame: DataFrame, saves: Sequence[Save]) -> Iterator[tuple[int, Staged]]:
    """Stage a DataFrame; of the attempts at a task Spark hands back what the winner says of each save."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        partition = context.partitionId()
        try:
            staged = load_all(saves, batches, partition=partition, attempt=context.taskAttemptId())
        except RowError as error:
            staged = refused(saves, error, partition=partition)
        told = [json.dumps(asdict(each)) for each in staged]
        yield pa.RecordBatch.from_pydict({"number": pa.array(range(len(told)), pa.int32()), "staged": told})

    for number, told in frame.mapInArrow(stage, "number int, staged string").collect():
        each = Staged.of_json(told)
        if each.refused is not None:
            raise RowError(each.refused)
        yield number, each
