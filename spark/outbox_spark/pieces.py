"""Write the rows of a task straight to where they belong, in one transaction with the piece's row in the ledger.

Spark asks its commit coordinator only when the task has ended, commit and all: it would keep no twin from writing. So
the ledger does. Of two attempts at a piece the second waits for the first one's transaction, finds the piece written,
and reports it as its own. The driver compares what each attempt has read with what the ledger has.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_postgresql import dbapi

from outbox_spark.connection import connect_task, wait_for_room
from outbox_spark.errors import BatchError, one_line
from outbox_spark.load import chunks_of, load, load_each
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
            return _write(cursor, save, pieces, rows=rows, checksum=checksum, partition=partition)
    except dbapi.Error as error:
        raise BatchError(f"partition {partition} could not be written: {one_line(error)}") from None


def _stage(
    save: Save, pieces: Pieces, rows: Iterable[pa.RecordBatch], checksum: "Checksum", *, partition: int, attempt: int
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
    *,
    rows: Iterable[pa.RecordBatch],
    checksum: "Checksum",
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


class Checksum:
    """SHA-256 over rows in their order, and over what the options make of them.

    It depends neither on how the rows are cut into batches nor on the bytes that Arrow leaves undefined beneath a NULL.
    Each column is hashed as separate streams, of NULLs, of lengths and of values. The order of rows counts, since it is
    the order in which the events of a key are delivered.
    """

    def __init__(self, made_by: str) -> None:
        self.rows = 0
        self._made_by = made_by
        self._streams: dict[tuple[str, ...], Any] = {}

    def watch(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass batches on, and take their rows in."""
        for batch in batches:
            self.add(batch)
            yield batch

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in the next rows."""
        if batch.num_rows == 0:
            return
        self.rows += batch.num_rows
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            self._add((name,), values)

    def hexdigest(self) -> str:
        """Return the checksum of all rows so far."""
        whole = sha256(self._made_by.encode())
        for path, stream in self._streams.items():
            whole.update("\0".join(path).encode() + stream.digest())
        return whole.hexdigest()

    def _add(self, path: tuple[str, ...], values: pa.Array) -> None:
        self._add_fixed((*path, "null"), values.is_null().cast(pa.uint8()))
        values, kind = values.drop_null(), values.type
        if pa.types.is_struct(kind):
            for place, field in enumerate(kind):
                self._add((*path, f"{place} {field.name}"), pc.struct_field(values, place))
        elif pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            if pa.types.is_map(kind):
                values = values.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
            self._add_fixed((*path, "length"), pc.list_value_length(values).cast(pa.int64()))
            self._add((*path, "element"), values.flatten())
        elif pa.types.is_string(kind) or pa.types.is_binary(kind):
            self._add_texts(path, values, pa.int32())
        elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
            self._add_texts(path, values, pa.int64())
        elif pa.types.is_boolean(kind):
            self._add_fixed(path, values.cast(pa.uint8()))
        elif pa.types.is_floating(kind):  # processors differ in the bits of NaN
            self._add_fixed(path, pc.if_else(pc.is_nan(values), pa.scalar(float("nan"), kind), values))
        elif not pa.types.is_null(kind):
            self._add_fixed(path, values)

    def _add_texts(self, path: tuple[str, ...], values: pa.Array, offset_type: pa.DataType) -> None:
        self._add_fixed((*path, "length"), pc.binary_length(values).cast(pa.int64()))
        _, offset_bytes, data = values.buffers()
        offsets = pa.Array.from_buffers(offset_type, len(values) + 1, [None, offset_bytes], offset=values.offset)
        self._update(path, data, offsets[0].as_py(), offsets[-1].as_py())

    def _add_fixed(self, path: tuple[str, ...], values: pa.Array) -> None:
        width = values.type.bit_width // 8
        self._update(path, values.buffers()[1], values.offset * width, (values.offset + len(values)) * width)

    def _update(self, path: tuple[str, ...], buffer: pa.Buffer | None, start: int, end: int) -> None:
        stream = self._streams.setdefault(path, sha256())
        if buffer is not None:
            stream.update(memoryview(buffer)[start:end])
