"""Load the rows of one task attempt into its staging table, in one transaction; the executors' part."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from typing import TypeVar

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.connection import connect_task
from outbox_spark.errors import BatchError, one_line
from outbox_spark.plan import Save, Staged
from outbox_spark.rows import naming_refused, staging_rows

BYTES_PER_INGEST = 32 * 1024 * 1024
UNDEFINED_TABLE = "42P01"
Rows = TypeVar("Rows")


def load(save: Save, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int) -> Staged:
    """Stage the rows of a partition, in their order.

    A partition without rows has no table. On an error nothing is left behind; a killed process may leave the table.
    If the pattern is gone, the partition is left out: the driver that commits the batch drops what others have staged.

    Raises:
        RowError: the database would refuse a value; the message has the row's key.
        BatchError: the database has refused something, or is gone.
    """
    chunks = chunks_of(batches, save.options.batchsize)
    first = next(chunks, None)
    if first is None:
        return Staged(partition, None, 0)
    try:
        return _stage(save, chain((first,), chunks), partition=partition, attempt=attempt)
    except dbapi.Error as error:
        if error.sqlstate == UNDEFINED_TABLE:
            return Staged(partition, None, 0, is_left_out=True)
        raise BatchError(f"partition {partition} could not be staged: {one_line(error)}") from None


def _stage(save: Save, chunks: Iterable[pa.RecordBatch], *, partition: int, attempt: int) -> Staged:
    table = save.staging.table_of(attempt)
    rows = 0

    def made() -> Iterator[tuple[pa.RecordBatch, int, pa.RecordBatch]]:
        nonlocal rows
        for chunk in chunks:
            yield chunk, rows, staging_rows(save, chunk, partition=partition, first=rows)
            rows += chunk.num_rows

    def ingest(made: tuple[pa.RecordBatch, int, pa.RecordBatch]) -> None:
        chunk, first, staged = made
        with naming_refused(save, chunk, table, partition=partition, first=first):
            cursor.adbc_ingest(table, staged, mode="append", db_schema_name=save.staging.schema)

    with closing(connect_task(save.info)) as connection, closing(connection.cursor()) as cursor:
        # The table is new in the transaction that fills it: PostgreSQL then only ever appends to it. So the commit
        # reads the rows in the order of the DataFrame.
        cursor.execute("BEGIN")
        cursor.execute(save.staging.create(attempt))
        load_each(made(), ingest)
        cursor.execute("COMMIT")
    return Staged(partition, table, rows)


def load_each(made: Iterable[Rows], ingest: Callable[[Rows], object]) -> None:
    """Ingest each while the next is made: the server and this process work at the same time."""
    with ThreadPoolExecutor(max_workers=1) as ingests:
        under_way: Future[object] | None = None
        for rows in made:
            if under_way is not None:
                under_way.result()
            under_way = ingests.submit(ingest, rows)
        if under_way is not None:
            under_way.result()


def chunks_of(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Gather batches up to about `size` rows, or as many bytes as one ingest should hold."""
    gathered: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        gathered.append(batch)
        rows += batch.num_rows
        if rows >= size or sum(each.nbytes for each in gathered) >= BYTES_PER_INGEST:
            yield pa.concat_batches(gathered)
            gathered, rows = [], 0
    if gathered:
        yield pa.concat_batches(gathered)
