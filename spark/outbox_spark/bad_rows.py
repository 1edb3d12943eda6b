"""Take rows out that no table takes, so that the others are staged; the executors' part of `badRows=quarantine`.

What a row lacks is found before it is sent, or by PostgreSQL in the COPY into staging. Then the rows before it are sent
again, and those behind it. So each row is sent at most twice, and all stay in their order.
"""

import json
from collections.abc import Callable, Iterator

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from outbox_spark.errors import RowError
from outbox_spark.plan import BadRow, Quarantine, Save
from outbox_spark.rows import UNREADABLE, json_values, staging_rows

Ingest = Callable[[pa.RecordBatch, int, pa.RecordBatch], object]  # rows of the DataFrame, the first's position, staged


class Sieve:
    """The bad rows of one partition."""

    def __init__(self, save: Save, quarantine: Quarantine, partition: int) -> None:
        self._save = save
        self._most = quarantine.most
        self._own = list(range(quarantine.columns))
        self._partition = partition
        self._found: list[BadRow] = []

    @property
    def found(self) -> tuple[BadRow, ...]:
        return tuple(sorted(self._found, key=lambda bad: bad.position))

    def staged(self, rows: pa.RecordBatch, first: int) -> Iterator[tuple[pa.RecordBatch, int, pa.RecordBatch]]:
        """Yield the good rows in parts, each with the position of its first row, and as they are staged.

        Raises:
            RowError: there are more bad rows than may be.
        """
        waiting = [(0, rows.num_rows)]
        while waiting:
            low, high = waiting.pop()
            if low == high:
                continue
            part = part_of(rows, low, high)
            try:
                yield part, first + low, staging_rows(self._save, part, partition=self._partition, first=first + low)
            except RowError as error:
                bad = low + self._put(part, first + low, error)
                waiting += [(bad + 1, high), (low, bad)]

    def ingest(self, cursor: dbapi.Cursor, part: tuple[pa.RecordBatch, int, pa.RecordBatch], ingest: Ingest) -> int:
        """Send a part without the rows that PostgreSQL refuses; return how many it takes.

        Raises:
            RowError: there are more bad rows than may be.
        """
        rows, first, staged = part
        taken, low = 0, 0
        while low < rows.num_rows:
            rest = part_of(rows, low, rows.num_rows)
            cursor.execute("SAVEPOINT part")
            try:
                ingest(rest, first + low, part_of(staged, low, rows.num_rows))
                return taken + int(rest.num_rows)
            except RowError as error:
                cursor.execute("ROLLBACK TO SAVEPOINT part")
                bad = low + self._put(rest, first + low, error)
            if bad > low:
                ingest(part_of(rows, low, bad), first + low, part_of(staged, low, bad))
            taken, low = taken + bad - low, bad + 1
        return taken

    def _put(self, rows: pa.RecordBatch, first: int, error: RowError) -> int:
        """Take a row out; return its place among these rows."""
        place = error.place
        if place is None:
            raise error
        self._found.append(BadRow(first + place, error.fault, row_json(rows.select(self._own), place)))
        if len(self._found) > self._most:
            raise RowError(
                f"partition {self._partition} has more than {self._most} bad rows, the most that maxBadRows allows. "
                f"One of them: {error}",
                place=place,
            )
        return place


def row_json(rows: pa.RecordBatch, place: int) -> str:
    """Return a row as JSON, whatever is in it."""
    row = rows.take(pa.array([place]))
    named = zip(row.schema.names, row.columns, strict=True)
    return f"{{{','.join(f'{json.dumps(name)}:{_json(column)}' for name, column in named)}}}"


def _json(column: pa.Array) -> str:
    """Return the JSON of the only value; what has no JSON as text."""
    kind = column.type
    if not any(is_faulty(column) for is_faulty, _ in UNREADABLE):
        try:
            return str(json_values(column)[0].as_py())
        except ValueError:  # NaN and infinity
            return json.dumps(str(column[0].as_py()))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return json.dumps(column.cast(pa.binary())[0].as_py().decode(errors="replace"))
    return json.dumps("cannot be read")


def part_of(rows: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    """Return the rows from one place up to another."""
    # Taken, not sliced: a slice of lists still has the values of all.
    return rows if high - low == rows.num_rows else rows.take(pa.array(range(low, high)))
