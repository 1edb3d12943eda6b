"""Load the rows of one task attempt into its staging tables, in one transaction; the executors' part."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import chain
from typing import TypeVar

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.bad_rows import Sieve, part_of
from outbox_spark.connection import connect_task
from outbox_spark.errors import BatchError, RowError, one_line
from outbox_spark.events import events_of
from outbox_spark.plan import Save, Staged
from outbox_spark.rows import naming_refused, staging_rows

BYTES_PER_INGEST = 32 * 1024 * 1024
UNDEFINED_TABLE = "42P01"
ROWS_PER_CALL = 10_000  # as dicts for a Python function, which may make many events of each
REFUSING_WITHIN = "10s"  # that other tasks load, when one finds a value that no table takes
Rows = TypeVar("Rows")
Part = tuple[pa.RecordBatch, int, pa.RecordBatch]  # its rows in the DataFrame, the position of the first, as staged


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


def refused(saves: Sequence[Save], error: RowError, *, partition: int) -> list[Staged]:
    """Return what lets the commit refuse the batch: tried again, the task would find the same value.

    The patterns go, so that tasks which have not begun to load find nothing to load into, and end.

    Raises:
        RowError: another try may do better.
    """
    if error.place is None:
        raise error
    with (
        suppress(dbapi.Error),
        closing(connect_task(saves[0].info)) as connection,
        closing(connection.cursor()) as cursor,
    ):
        cursor.execute(f"SET lock_timeout = '{REFUSING_WITHIN}'")
        for save in saves:
            cursor.execute(f"DROP TABLE IF EXISTS {save.staging.quoted_schema}.{save.staging.prefix}")
    return [Staged(partition, None, 0, refused=str(error)) for _ in saves]


def _stage(saves: Sequence[Save], chunks: Iterable[pa.RecordBatch], *, partition: int, attempt: int) -> list[Staged]:
    read, written = [0] * len(saves), [0] * len(saves)
    created: set[int] = set()
    sieves = [None if save.plan.quarantine is None else Sieve(save, save.plan.quarantine, partition) for save in saves]

    def made() -> Iterator[tuple[int, Part]]:
        for chunk in chunks:
            for number, (save, sieve) in enumerate(zip(saves, sieves, strict=True)):
                for rows in _rows_of(save, chunk):
                    first = read[number]
                    if sieve is None:
                        yield number, (rows, first, staging_rows(save, rows, partition=partition, first=first))
                    else:
                        yield from ((number, part) for part in sieve.staged(rows, first))
                    read[number] += rows.num_rows

    def ingest(made: tuple[int, Part]) -> None:
        number, part = made
        save, sieve = saves[number], sieves[number]
        table = save.staging.table_of(attempt)

        def send(rows: pa.RecordBatch, first: int, staged: pa.RecordBatch) -> None:
            with naming_refused(save, rows, table, partition=partition, first=first):
                cursor.adbc_ingest(table, staged, mode="append", db_schema_name=save.staging.schema)

        if number not in created:
            cursor.execute(save.staging.create(attempt))
            created.add(number)
        if sieve is None:
            send(*part)
            written[number] += part[0].num_rows
        else:
            written[number] += sieve.ingest(cursor, part, send)

    with closing(connect_task(saves[0].info)) as connection, closing(connection.cursor()) as cursor:
        # A table is new in the transaction that fills it: PostgreSQL then only ever appends to it. So the commit
        # reads the rows in the order of the DataFrame.
        cursor.execute("BEGIN")
        load_each(made(), ingest)
        cursor.execute("COMMIT")
    return [
        Staged(partition, save.staging.table_of(attempt) if rows else None, rows, bad=sieve.found if sieve else ())
        for save, rows, sieve in zip(saves, written, sieves, strict=True)
    ]


def _rows_of(save: Save, chunk: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows as the plan takes them: themselves, or the events that a Python function makes of them."""
    event = save.plan.event
    if event is None or event.maker is None:
        yield chunk
        return
    parts = (
        part_of(chunk, first, min(first + ROWS_PER_CALL, chunk.num_rows))
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
