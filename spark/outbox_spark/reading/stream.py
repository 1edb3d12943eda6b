"""The reader that Spark calls for a stream: rows as they are sent, each in one micro-batch.

An offset is a moment: all that was sent before it is read. A sent row carries the time of its mark and never changes.
So a micro-batch is the rows of the time between two offsets, the same ones however often Spark asks for them. Rows that
a clock which went back puts before an offset would never be read: they are counted, and end the query.

What only the driver does is imported where it is done, since executors may have no psycopg.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from outbox_spark.errors import ReadError
from outbox_spark.options import MAX_NUMBER
from outbox_spark.reading.reader import read_task
from outbox_spark.reading.tasks import Read, Task
from outbox_spark.spark_api import (
    DataSourceStreamReader,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    from outbox_spark.reading.brake import Limits
    from outbox_spark.reading.plan import Day

# A clock that is set back by less than that, or is behind that of the server before a failover, hides no row.
BEHIND = timedelta(seconds=10)
COUNTED = timedelta(hours=1)  # before an offset, and the rest of that day: rows that come to light there

Offset = dict[str, Any]  # "sentBefore", and "rows": how many there were then


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # mypy does not follow pyspark
    """One query; Spark keeps its offsets in the checkpoint."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._until: datetime | None = None  # of Trigger.AvailableNow; None: without an end

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """End with what is sent by now, in as many micro-batches as the limits ask for."""
        from outbox_spark.connection import connect  # noqa: PLC0415
        from outbox_spark.reading.plan import naming_role, settled_moment  # noqa: PLC0415

        schema = self._read.options.outbox_schema
        with connect(self._read.info) as connection, naming_role(schema):
            self._until = settled_moment(connection, schema) - BEHIND

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return the limits of the options; a trigger that reads all at once ignores them."""
        options = self._read.options
        if options.max_rows is None and options.max_time is None:
            return ReadAllAvailable()
        return ReadMaxRows(options.max_rows or MAX_NUMBER)

    def initialOffset(self) -> Offset:  # noqa: N802  # Spark's name
        """Begin with the day that was asked for, or with the oldest that is kept."""
        oldest, asked = self._days()[0].first, self._read.options.starting_day
        return _offset(oldest if asked is None else max(oldest, datetime.combine(asked, time(), UTC)))

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the moment up to which every mark has ended, or one before, as the limits ask for.

        Without a row in between it is the start, and Spark makes no micro-batch. Only a day that ends moves it, so that
        retention finds no stream that still waits for the day.

        Raises:
            ReadError: the database's clock went back by more than BEHIND, and rows are missed, or would be.
        """
        from outbox_spark.connection import connect  # noqa: PLC0415
        from outbox_spark.reading.brake import end_of_batch  # noqa: PLC0415
        from outbox_spark.reading.plan import count_sent, list_days, naming_role, settled_moment  # noqa: PLC0415

        schema, begun = self._read.options.outbox_schema, _moment(start)

        def rows_before(moment: datetime) -> int:
            day = (moment - COUNTED).replace(hour=0, minute=0, second=0, microsecond=0)
            return count_sent(connection, schema, day, moment)

        with connect(self._read.info) as connection, naming_role(schema):
            moment = settled_moment(connection, schema)
            if moment < begun:
                raise ReadError(
                    f"by the clock of the database it is {moment}, and the stream must read what is sent from {begun} "
                    "on. The clock went back, or startingDay is in the future. Begin a new query when it is past that"
                )
            is_checked = self._read.options.fail_on_data_loss and "rows" in start
            if is_checked and (late := rows_before(begun) - start["rows"]) > 0:
                raise ReadError(
                    f"{late} rows carry a time before {begun}, until which the stream had read: the clock of the "
                    "database went back. Read that day again, and go on with failOnDataLoss=false"
                )
            end = max(begun, min(moment - BEHIND, self._until or moment))
            days, limits = list_days(connection, schema), self._limits(limit)
            reached = end_of_batch(connection, schema, days, start=begun, end=end, limits=limits)
            if reached is None and end.date() == begun.date():
                return start
            end = reached or end
            return _offset(end) | {"rows": rows_before(end)}

    def _limits(self, limit: ReadLimit) -> "Limits":
        from outbox_spark.reading.brake import Limits  # noqa: PLC0415

        if isinstance(limit, ReadAllAvailable):
            return Limits(None, None)
        options = self._read.options
        return Limits(options.max_rows, None if options.max_time is None else timedelta(seconds=options.max_time))

    def partitions(self, start: Offset, end: Offset) -> Sequence[Task]:
        """Divide the rows that were sent between two offsets.

        Raises:
            ReadError: days of that time are gone.
        """
        from outbox_spark.reading.plan import divide  # noqa: PLC0415

        first, beyond = _moment(start), _moment(end)
        days = self._days()
        if first < days[0].first and self._read.options.fail_on_data_loss:
            raise ReadError(
                f"the stream has read what was sent before {first}, and the oldest day that the table keeps is "
                f"{days[0].first:%Y-%m-%d}. Read the days between from the archive, and go on with failOnDataLoss=false"
            )
        return divide([day for day in days if day.first < beyond and day.next > first], self._read, beyond, first)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a task, as a batch does."""
        return read_task(self._read, partition)

    def _days(self) -> "Sequence[Day]":
        """Return the days that the table keeps, the oldest first.

        Raises:
            ReadError: there are no such days.
        """
        from outbox_spark.connection import connect  # noqa: PLC0415
        from outbox_spark.reading.plan import list_days  # noqa: PLC0415

        schema = self._read.options.outbox_schema
        with connect(self._read.info) as connection:
            days = list_days(connection, schema)
        if not days:
            raise ReadError(f"table {schema}.message_sent does not exist, or has no day yet: run `relay migrate`")
        return days


def _offset(moment: datetime) -> Offset:
    return {"sentBefore": moment.astimezone(UTC).isoformat()}


def _moment(offset: Offset) -> datetime:
    return datetime.fromisoformat(offset["sentBefore"])
