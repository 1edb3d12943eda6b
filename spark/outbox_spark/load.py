"""Load the rows of one task attempt into its staging table, in one transaction; the executors' part."""

from collections.abc import Iterable, Iterator
from contextlib import closing

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.errors import BatchError, one_line
from outbox_spark.patience import connect_task
from outbox_spark.plan import Save, Staged
from outbox_spark.rows import staging_rows

BYTES_PER_INGEST = 32 * 1024 * 1024


def load(save: Save, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int) -> Staged:
    """Stage the rows of a partition, in their order.

    A partition without rows has no table. On an error nothing is left behind; a killed process may leave the table.

    Raises:
        RowError: the database would refuse a value; the message has the row's key.
        BatchError: the database has refused something, or is gone.
    """
    chunks = chunks_of(batches, save.options.batchsize)
    chunk = next(chunks, None)
    if chunk is None:
        return Staged(partition, None, 0)
    try:
        return _stage(save, chunk, chunks, partition=partition, attempt=attempt)
    except dbapi.Error as error:
        raise BatchError(f"partition {partition} could not be staged: {one_line(error)}") from None


def _stage(
    save: Save, chunk: pa.RecordBatch | None, chunks: Iterator[pa.RecordBatch], *, partition: int, attempt: int
) -> Staged:
    table = save.staging.table_of(attempt)
    rows = 0
    with closing(connect_task(save.info)) as connection, closing(connection.cursor()) as cursor:
        # The table is new in the transaction that fills it: PostgreSQL then only ever appends to it,
        # so that the commit reads the rows in the order of the DataFrame.
        cursor.execute("BEGIN")
        cursor.execute(save.staging.create(attempt))
        while chunk is not None:
            staged = staging_rows(save, chunk, partition=partition, first=rows)
            cursor.adbc_ingest(table, staged, mode="append", db_schema_name=save.staging.schema)
            rows += staged.num_rows
            chunk = next(chunks, None)
        cursor.execute("COMMIT")
    return Staged(partition, table, rows)


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
