"""Load the rows of one task attempt into its staging tables, in one transaction; the executors' part."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from typing import TypeVar

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.connection import connect_task
from outbox_spark.errors import BatchError, one_line
from outbox_spark.events import events_of
from outbox_spark.plan import Save, Staged
from outbox_spark.rows import naming_refused, staging_rows

BYTES_PER_INGEST = 32 * 1024 * 1024
UNDEFINED_TABLE = "42P01"
ROWS_PER_CALL = 10_000  # as dicts for a Python function, which may make many events of each
Rows = TypeVar("Rows")


def load(save: Save, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int) -> Staged:
    """Stage the rows of a partition, in their order; as `load_all`."""
    (staged,) = load_all([save], batches, partition=partition, attempt=attempt)
    return staged


def load_all(saves: Sequence[Save], batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int) -> list[Staged]:
    """Stage what each plan makes of the rows of a partition, in their order; each row is read once.

    What has no rows has no table. On an error nothing is left behind; a killed process may leave the tables.
    If a pattern is gone, the partition is left out: the driver that commits the batch drops what others have staged.

    Raises:
        RowError: the database would refuse a value; the message has the row's key.
        BatchError: the database has refused something, or is gone.
    """
    chunks = chunks_of(batches, saves[0].options.batchsize)
    first = next(chunks, None)
    if first is None:
        return [Staged(partition, None, 0) for _ in saves]
    try:
        return _stage(saves, chain((first,), chunks), partition=partition, attempt=attempt)
    except dbapi.Error as error:
        if error.sqlstate == UNDEFINED_TABLE:
            return [Staged(partition, None, 0, is_left_out=True) for _ in saves]
        raise BatchError(f"partition {partition} could not be staged: {one_line(error)}") from None


def _stage(saves: Sequence[Save], chunks: Iterable[pa.RecordBatch], *, partition: int, attempt: int) -> list[Staged]:
    counts = [0] * len(saves)

    def made() -> Iterator[tuple[Save, pa.RecordBatch, int, pa.RecordBatch]]:
        for chunk in chunks:
            for place, save in enumerate(saves):
                for rows in _rows_of(save, chunk):
                    first = counts[place]
                    yield save, rows, first, staging_rows(save, rows, partition=partition, first=first)
                    counts[place] += rows.num_rows

    def ingest(made: tuple[Save, pa.RecordBatch, int, pa.RecordBatch]) -> None:
        save, rows, first, staged = made
        table = save.staging.table_of(attempt)
        if first == 0:
            cursor.execute(save.staging.create(attempt))
        with naming_refused(save, rows, table, partition=partition, first=first):
            cursor.adbc_ingest(table, staged, mode="append", db_schema_name=save.staging.schema)

    with closing(connect_task(saves[0].info)) as connection, closing(connection.cursor()) as cursor:
        # A table is new in the transaction that fills it: PostgreSQL then only ever appends to it. So the commit
        # reads the rows in the order of the DataFrame.
        cursor.execute("BEGIN")
        load_each(made(), ingest)
        cursor.execute("COMMIT")
    return [
        Staged(partition, save.staging.table_of(attempt) if rows else None, rows)
        for save, rows in zip(saves, counts, strict=True)
    ]


def _rows_of(save: Save, chunk: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows as the plan takes them: themselves, or the events that a Python function makes of them."""
    event = save.plan.event
    if event is None or event.maker is None:
        yield chunk
        return
    # Taken, not sliced: a slice of lists still has the values of all.
    parts = (
        chunk.take(pa.array(range(first, min(first + ROWS_PER_CALL, chunk.num_rows))))
        for first in range(0, chunk.num_rows, ROWS_PER_CALL)
    )
    yield from chunks_of(events_of(event.maker, parts), save.options.batchsize)


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
