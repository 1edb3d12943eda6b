"""The reader that Spark calls: tasks on the driver, rows as Arrow batches on the executors.

What only the driver does is imported where it is done, since executors may have no psycopg.
"""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.connection import connect_once
from outbox_spark.errors import ReadError, one_line
from outbox_spark.reading.fields import as_fields, refuse_no_object
from outbox_spark.reading.tasks import Read, Task
from outbox_spark.spark_api import DataSourceReader, InputPartition, arrow_schema

INSUFFICIENT_PRIVILEGE = "42501"

# One core of the server for one of Spark's.
BEGIN = (
    "BEGIN READ ONLY",
    "SET LOCAL TimeZone = 'UTC'",
    "SET LOCAL max_parallel_workers_per_gather = 0",
    "SET LOCAL jit = off",
)


class OutboxReader(DataSourceReader):  # type: ignore[misc]  # mypy does not follow pyspark
    """One read. Pickled to the executors, connection string and all, as Spark's JDBC source does.

    It takes no filters from Spark (`pushFilters`): Spark 4.3 keeps them in the DataFrame. A later query of it that has
    no filter silently lacks rows (docs/decisions/0022-read-by-blocks.md). Options select in their place.
    """

    def __init__(self, read: Read) -> None:
        self._read = read

    def partitions(self) -> list[Task]:
        """Divide the read into tasks. On the driver, once for each `load()`: Spark keeps them for later queries."""
        from outbox_spark.reading.plan import plan_tasks  # noqa: PLC0415

        return plan_tasks(self._read)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a task; on an executor, and more than once when Spark retries or speculates.

        Raises:
            ReadError: the database refuses, or is gone, or the day is no longer what was planned to be read.
        """
        return read_task(self._read, partition)


def read_task(read: Read, task: InputPartition) -> Iterator[pa.RecordBatch]:
    """Return the rows of a task.

    Raises:
        ReadError: the database refuses, or is gone, or the day is no longer what was planned to be read.
    """
    if not isinstance(task, Task):
        return  # Spark's stand-in for no tasks at all
    try:
        yield from _rows(read, task)
    except (dbapi.Error, OSError) as error:  # OSError: what the database says in the middle of the rows
        is_refused = isinstance(error, dbapi.Error) and error.sqlstate == INSUFFICIENT_PRIVILEGE
        remedy = f": give the role of url what {read.options.outbox_schema}_archive has" if is_refused else ""
        raise ReadError(f"{task} could not be read: {one_line(error).rstrip('.')}{remedy}") from None


def _rows(read: Read, task: Task) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(read.schema)
    with (
        closing(connect_once(read.info)) as connection,
        closing(connection.cursor()) as cursor,
    ):
        for statement in BEGIN:
            cursor.execute(statement)
        cursor.execute(task.statement)
        with cursor.fetch_record_batch() as batches:
            for batch in batches:
                yield as_planned(batch, schema, fails_fast=read.options.fails_fast)
        if task.check is not None:
            cursor.execute(task.check)
            if cursor.fetchone() != (True,):
                raise ReadError(
                    f"{task} was dropped or rewritten (by retention, or VACUUM FULL) since the first query of the "
                    "DataFrame, whose plan it keeps: load() it again"
                )


def as_planned(batch: pa.RecordBatch, schema: pa.Schema, *, fails_fast: bool = False) -> pa.RecordBatch:
    """Return a batch in the types that Spark was promised; fields of the payload become one column.

    Args:
        fails_fast: a payload whose fields do not fit fails the read; else what does not fit is null.
    Raises:
        ReadError: a value does not fit; the column, or the row of the payload, is named.
    """
    ids = None
    if fails_fast and any(pa.types.is_struct(kind) for kind in schema.types):
        *_, ids, is_no_object = batch.columns
        refuse_no_object(is_no_object, ids)
    sent = zip(batch.schema.names, batch.columns, strict=True)
    arrays = []
    for field in schema:
        if pa.types.is_struct(field.type):
            arrays.append(as_fields([text for _, text in islice(sent, field.type.num_fields)], field.type, ids))
        else:
            arrays.append(_cast(*next(sent), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column  # json and numeric come as text
    try:
        return stored.cast(kind)
    except pa.ArrowInvalid as error:
        raise ReadError(f"a value of {name!r} does not fit into {kind}: {error}") from None
