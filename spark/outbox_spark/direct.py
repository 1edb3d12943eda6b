"""Write the rows of a task straight to where they belong, in one transaction with the piece's row in the ledger.

Spark asks its commit coordinator only when the task has ended, commit and all: it would keep no twin from writing. So
the ledger does. Of two attempts at a piece the second waits for the first one's transaction, finds the piece written,
and reports it as its own. The driver compares what each attempt has read with what the ledger has.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.checksum import Checksum
from outbox_spark.errors import BatchError, one_line
from outbox_spark.load import chunks_of, load, load_each
from outbox_spark.patience import connect_task, wait_for_room
from outbox_spark.plan import Pieces, Save, Staged
from outbox_spark.rows import final_rows, naming_refused

# A host that vanished with its executor leaves its transaction open: found within about 25 s, not two hours.
PREPARE = """
    BEGIN;
    SET LOCAL tcp_keepalives_idle = 10;
    SET LOCAL tcp_keepalives_interval = 5;
    SET LOCAL tcp_keepalives_count = 3
"""


def write_piece(
    save: Save, pieces: Pieces, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int
) -> Staged:
    """Write the rows of a partition, in their order, unless the ledger has them; in a rerun stage them for the commit.

    Raises:
        RowError: the database would refuse a value; the message has the row's key.
        BatchError: the database has refused something, or is gone.
    """
    checksum = Checksum(pieces.made_by)
    rows = checksum.watch(batches)
    try:
        if not pieces.directly:
            return _stage(save, pieces, rows, checksum, partition=partition, attempt=attempt)
        with closing(connect_task(save.info)) as connection, closing(connection.cursor()) as cursor:
            if save.room is not None:
                wait_for_room(save.room, lambda query: cursor.execute(query).fetchall()[0][0])
            return _write(cursor, save, pieces, rows, checksum, partition=partition)
    except dbapi.Error as error:
        raise BatchError(f"partition {partition} could not be written: {one_line(error)}") from None


def _stage(
    save: Save, pieces: Pieces, rows: Iterable[pa.RecordBatch], checksum: Checksum, *, partition: int, attempt: int
) -> Staged:
    # A rerun may have other rows than the run before. Were a missing piece written at once, it could repeat rows of a
    # written one before anybody compared that one.
    with closing(connect_task(save.info)) as connection, closing(connection.cursor()) as cursor:
        cursor.execute(pieces.find(partition))
        is_written = cursor.fetchone() is not None
    if not is_written:
        staged = load(save, rows, partition=partition, attempt=attempt)
        return replace(staged, checksum=checksum.hexdigest())
    _exhaust(rows)
    return Staged(partition, None, checksum.rows, checksum.hexdigest())


def _write(
    cursor: dbapi.Cursor,
    save: Save,
    pieces: Pieces,
    rows: Iterable[pa.RecordBatch],
    checksum: Checksum,
    *,
    partition: int,
) -> Staged:
    for statement in PREPARE.split(";"):
        cursor.execute(statement)
    cursor.execute(pieces.enter(partition, save.token))
    if cursor.fetchone() is None:
        cursor.execute("ROLLBACK")
        _exhaust(rows)  # the commit compares them with those that are written
        return Staged(partition, None, checksum.rows, checksum.hexdigest())
    event = save.plan.event
    assert save.plan.table is not None, "a save() has a table"  # noqa: S101
    assert event is not None, "and events"  # noqa: S101
    schema, table = save.plan.table

    def made() -> Iterator[tuple[pa.RecordBatch, int, tuple[pa.RecordBatch, pa.RecordBatch]]]:
        first = 0
        for chunk in chunks_of(rows, save.options.batchsize):
            yield chunk, first, final_rows(save, event, chunk, partition=partition, first=first)
            first += chunk.num_rows

    def ingest(made: tuple[pa.RecordBatch, int, tuple[pa.RecordBatch, pa.RecordBatch]]) -> None:
        chunk, first, (business, events) = made
        # The parent, never the partition: the statement trigger that rings the relay is the parent's.
        both = ((schema, table, business), (save.options.outbox_schema, "message", events))
        for into_schema, into, rows_of in both:
            with naming_refused(save, chunk, into, partition=partition, first=first):
                cursor.adbc_ingest(into, rows_of, mode="append", db_schema_name=into_schema)

    load_each(made(), ingest)
    cursor.execute(pieces.count_inserted)
    ((inserted,),) = cursor.fetchall()
    if inserted < checksum.rows:
        raise BatchError(
            f"partition {partition} was not written: of {checksum.rows} rows {inserted} reached {schema}.{table} (has "
            "a trigger refused rows, or is track_counts off?)"
        )
    written = Staged(partition, None, checksum.rows, checksum.hexdigest())
    cursor.execute(pieces.note_rows(written))
    cursor.execute("COMMIT")
    return written


def _exhaust(rows: Iterable[pa.RecordBatch]) -> None:
    deque(rows, maxlen=0)
