"""Write the rows of a task straight to where they belong, in one transaction with the piece's row in the ledger.

Spark asks its commit coordinator only when the task has ended, commit and all: it would keep no twin from writing. So
the ledger does. Of two attempts at a piece the second waits for the first one's transaction, finds the piece written,
and reports it as its own.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.errors import BatchError, one_line
from outbox_spark.load import chunks_of, load_each
from outbox_spark.patience import connect_task, wait_for_room
from outbox_spark.plan import Pieces, Save, Staged
from outbox_spark.rows import final_rows

# A host that vanished with its executor leaves its transaction open: found within about 25 s, not two hours.
PREPARE = """
    BEGIN;
    SET LOCAL tcp_keepalives_idle = 10;
    SET LOCAL tcp_keepalives_interval = 5;
    SET LOCAL tcp_keepalives_count = 3
"""


def write_piece(save: Save, pieces: Pieces, batches: Iterable[pa.RecordBatch], *, partition: int) -> Staged:
    """Write the rows of a partition, in their order, unless the ledger has them.

    Raises:
        RowError: the database would refuse a value; the message has the row's key.
        BatchError: the database has refused something, or is gone; or the piece was written with other rows.
    """
    try:
        with closing(connect_task(save.info)) as connection, closing(connection.cursor()) as cursor:
            if save.room is not None:
                wait_for_room(save.room, lambda query: cursor.execute(query).fetchall()[0][0])
            return _write(cursor, save, pieces, batches, partition)
    except dbapi.Error as error:
        raise BatchError(f"partition {partition} could not be written: {one_line(error)}") from None


def _write(
    cursor: dbapi.Cursor, save: Save, pieces: Pieces, batches: Iterable[pa.RecordBatch], partition: int
) -> Staged:
    for statement in PREPARE.split(";"):
        cursor.execute(statement)
    cursor.execute(pieces.enter(partition, save.token))
    if cursor.fetchone() is None:
        cursor.execute("ROLLBACK")
        return _recognise(cursor, pieces, batches, partition)
    event = save.plan.event
    assert save.plan.table is not None, "a save() has a table"  # noqa: S101
    assert event is not None, "and events"  # noqa: S101
    schema, table = save.plan.table
    rows = 0

    def made() -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        nonlocal rows
        for chunk in chunks_of(batches, save.options.batchsize):
            yield final_rows(save, event, chunk, partition=partition, first=rows)
            rows += chunk.num_rows

    def ingest(both: tuple[pa.RecordBatch, pa.RecordBatch]) -> None:
        cursor.adbc_ingest(table, both[0], mode="append", db_schema_name=schema)
        # The parent, never the partition: the statement trigger that rings the relay is the parent's.
        cursor.adbc_ingest("message", both[1], mode="append", db_schema_name=save.options.outbox_schema)

    load_each(made(), ingest)
    cursor.execute(pieces.count_inserted)
    ((inserted,),) = cursor.fetchall()
    if inserted < rows:
        raise BatchError(
            f"partition {partition} was not written: of {rows} rows {inserted} reached {schema}.{table} (has a trigger "
            "refused rows, or is track_counts off?)"
        )
    cursor.execute(pieces.note_rows(partition, rows))
    cursor.execute("COMMIT")
    return Staged(partition, None, rows)


def _recognise(cursor: dbapi.Cursor, pieces: Pieces, batches: Iterable[pa.RecordBatch], partition: int) -> Staged:
    """Report a piece that is written; its rows are counted, for they may have been divided otherwise."""
    cursor.execute(pieces.ask_rows(partition))
    ((written,),) = cursor.fetchall()
    rows = sum(batch.num_rows for batch in batches)
    if rows != written:
        raise BatchError(
            f"partition {partition} of the batch was written with {written} rows and has {rows} now: a rerun takes the "
            "same rows in the same partitions"
        )
    return Staged(partition, None, rows)
