"""What the driver decides of a read before any task runs: the SELECT, the picture that all tasks see, and the tasks."""

import time as clock
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from itertools import accumulate, pairwise

import psycopg
from psycopg.sql import SQL, Composable, Identifier, Literal
from pyspark.sql.types import StructType

from outbox_spark.connection import connect, conninfo
from outbox_spark.errors import ReadError, TableError
from outbox_spark.options import SENT, ReadOptions, read_options
from outbox_spark.reading.columns import select
from outbox_spark.reading.tasks import Read, Task

BYTES_PER_TASK = 128 * 1024 * 1024
MARKS_MAY_TAKE = 60.0  # seconds
MARK_POLL = 0.02  # seconds

# Marks that had begun before carry a time before the picture's, and may not be visible yet. They hold this lock, since
# a mark is the first statement of its transaction.
MARKING = SQL("""
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'
        AND relation IN (to_regclass({sent}), to_regclass({named}))
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")

# A query of the table no longer sees one that is being detached.
LIST_DAYS = SQL("""
    SELECT part, pg_relation_filenode(part), first, next,
        pg_relation_size(part) / current_setting('block_size')::integer, pg_table_size(part)
    FROM (
        SELECT inhrelid AS part, first, next, (first AT TIME ZONE 'UTC')::date AS day
        FROM pg_inherits
        CROSS JOIN LATERAL (SELECT pg_get_expr(relpartbound, oid) AS bound FROM pg_class WHERE oid = inhrelid) AS part
        CROSS JOIN LATERAL (
            SELECT substring(bound FROM $$FROM \\('([^']+)'\\)$$)::timestamptz AS first,
                substring(bound FROM $$TO \\('([^']+)'\\)$$)::timestamptz AS next
        ) AS bounds
        WHERE inhparent = to_regclass({sent}) AND NOT inhdetachpending
    ) AS days
    WHERE {wanted}
    ORDER BY first
""")

# The one without a bound has the ids behind all others. The first one begins with the lowest id.
LIST_SEGMENTS = SQL(r"""
    SELECT part, name, pg_relation_filenode(part), pg_table_size(part),
        CASE WHEN bound = 'DEFAULT' THEN max(past) OVER () ELSE coalesce(first, -9223372036854775808) END AS first
    FROM (
        SELECT inhrelid AS part, relname AS name, bound,
            substring(bound FROM $$FROM \('(-?[0-9]+)'\)$$)::bigint AS first,
            substring(bound FROM $$TO \('(-?[0-9]+)'\)$$)::bigint AS past
        FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        CROSS JOIN LATERAL (SELECT pg_get_expr(relpartbound, pg_class.oid) AS bound) AS bounds
        WHERE inhparent = to_regclass({log})
    ) AS segment
    ORDER BY first
""")

# Blocks of 4,096 ids that receipts of this time name, by segment.
LIST_BLOCKS = SQL("""
    SELECT width_bucket(block, {firsts}) - 1, min(block), max(block)
    FROM {schema}.sent_blocks({start}, {end}) AS named (block)
    GROUP BY 1
    ORDER BY 1
""")
BLOCK_BITS = 12

COUNT_SENT = SQL("SELECT count(*) FROM {schema}.sent(%s, %s)")

# The lock that the reading has taken keeps the day as it is until the transaction ends.
IS_UNCHANGED = SQL("""
    SELECT EXISTS (
        SELECT FROM pg_inherits
        WHERE inhrelid = {part} AND NOT inhdetachpending AND pg_relation_filenode(inhrelid) = {filenode}
    )
""")


@dataclass(frozen=True, slots=True)
class Day:
    """A day of sent rows that must be read."""

    part: int
    filenode: int
    first: datetime
    next: datetime
    blocks: int
    bytes: int  # with what is stored out of line


@dataclass(frozen=True, slots=True)
class Blocks:
    """The ids of a segment of the log that must be read, and the part of the segment that they are."""

    part: int
    name: str
    filenode: int
    bytes: int
    first: int
    last: int


def plan_read(given: Mapping[str, str], schema: StructType, *, is_stream: bool = False) -> Read:
    """Read the options and make the SELECT.

    Raises:
        OptionError, ColumnError: with every fault, by name.
    """
    options = read_options(given, is_stream=is_stream)
    # Sent rows are read by blocks, and a view has no blocks.
    table = Identifier(options.outbox_schema, "message" if options.state == SENT else "message_state")
    return Read(
        options=options,
        info=conninfo(options.url, options.user, options.password),
        select=select(schema, table, fails_fast=options.fails_fast).as_string(),
        schema=schema,
        conditions=tuple(each.as_string() for each in _selected(options)),
    )


def plan_tasks(read: Read) -> list[Task]:
    """Divide what must be read.

    Sent rows do not change, so all tasks see one picture, however late they run. It is what was sent before this
    moment, once every mark that had begun by then has ended. No snapshot is held open for that, which would keep vacuum
    from its work. Rows of any other state move meanwhile: a single statement gives them as they are at one moment.

    Raises:
        TableError: there is no outbox.
        ReadError: a mark does not end.
    """
    if read.options.state != SENT:
        return [Task(read.where())]
    schema = read.options.outbox_schema
    with connect(read.info) as connection:
        moment = settled_moment(connection, schema)
        days = list_days(connection, schema, SQL("first < {}").format(Literal(moment)), *_days(read.options))
        start, end = _times(read.options, moment)
        return [*divide(days, read, moment), *divide_log(list_blocks(connection, schema, start, end), read, end, start)]


def list_days(connection: psycopg.Connection, schema: str, *wanted: Composable) -> list[Day]:
    """Return the days of sent rows for which all of these conditions hold, the oldest first."""
    all_wanted = SQL(" AND ").join((SQL("true"), *wanted))
    statement = LIST_DAYS.format(sent=Literal(f"{schema}.message_sent"), wanted=all_wanted)
    connection.execute("SET TimeZone = 'UTC'")  # bounds are read as moments, be they dates or moments themselves
    return [Day(*row) for row in connection.execute(statement)]


def list_blocks(connection: psycopg.Connection, schema: str, start: datetime, end: datetime) -> list[Blocks]:
    """Return where rows of the log lie that were sent from `start` until just before `end`, by segment."""
    segments = connection.execute(LIST_SEGMENTS.format(log=Literal(f"{schema}.message_log"))).fetchall()
    firsts = [first >> BLOCK_BITS for *_, first in segments]
    statement = LIST_BLOCKS.format(
        schema=Identifier(schema), firsts=Literal(firsts), start=Literal(start), end=Literal(end)
    )
    found = []
    for index, first, last in connection.execute(statement).fetchall():
        part, name, filenode, size, _ = segments[index]
        found.append(Blocks(part, name, filenode, size, first, last))
    return found


def settled_moment(connection: psycopg.Connection, schema: str) -> datetime:
    """Return the database's time, in UTC, once every mark that carries an earlier one has ended.

    Raises:
        TableError: there is no outbox.
        ReadError: a mark does not end.
    """
    sent = Literal(f"{schema}.message_sent")
    statement = MARKING.format(sent=sent, named=Literal(f"{schema}.receipt"))
    ((exists, moment),) = connection.execute(
        SQL("SELECT to_regclass({}) IS NOT NULL, clock_timestamp()").format(sent)
    ).fetchall()
    if not exists:
        raise TableError(
            f"table {schema}.message of option outboxSchema does not exist in database {connection.info.dbname!r}: "
            "run `relay migrate` on it"
        )
    give_up_at = clock.monotonic() + MARKS_MAY_TAKE
    begun = set(connection.execute(statement).fetchall())
    while begun := begun & set(connection.execute(statement).fetchall()):
        if clock.monotonic() > give_up_at:
            raise ReadError(f"{len(begun)} transactions that mark rows have not ended for {MARKS_MAY_TAKE:g} s")
        clock.sleep(MARK_POLL)
    found: datetime = moment  # in the session's time zone, in which days begin at other times
    return found.astimezone(UTC)


def count_sent(connection: psycopg.Connection, schema: str, start: datetime, end: datetime) -> int:
    """Count the rows that were sent from `start` until just before `end`."""
    ((count,),) = connection.execute(COUNT_SENT.format(schema=Identifier(schema)), [start, end]).fetchall()
    return int(count)


def _selected(options: ReadOptions) -> Iterator[Composable]:
    """Yield the conditions on rows."""
    equal = ("state", "aggregate_type", "aggregate_id", "event_type")
    compared = [(name, SQL("="), getattr(options, name)) for name in equal]
    compared += [("id", SQL(">="), options.starting_id), ("id", SQL("<="), options.ending_id)]
    for name, comparison, value in compared:
        if value is not None:
            yield SQL("message.{} {} {}").format(Identifier(name), comparison, Literal(value))


def _days(options: ReadOptions) -> Iterator[Composable]:
    """Yield the conditions on days of sent rows."""
    if options.starting_day is not None:
        yield SQL("day >= {}").format(Literal(options.starting_day))
    if options.ending_day is not None:
        yield SQL("day <= {}").format(Literal(options.ending_day))


def _times(options: ReadOptions, moment: datetime) -> tuple[datetime, datetime]:
    """Return the time of which sent rows are asked for, until just before the second moment."""
    start, end = datetime(1, 1, 1, tzinfo=UTC), moment
    if options.starting_day is not None:
        start = datetime.combine(options.starting_day, time(), UTC)
    if options.ending_day is not None:
        end = min(end, datetime.combine(options.ending_day, time(), UTC) + timedelta(days=1))
    return start, end


def divide(days: Sequence[Day], read: Read, end: datetime, start: datetime | None = None) -> list[Task]:
    """Divide what these days have of the time from `start` until just before `end`."""
    wanted = _shares(read.options.partitions, [day.bytes for day in days], [day.bytes for day in days])
    return [
        task
        for day, pieces in zip(days, wanted, strict=True)
        for task in _tasks(day, read, start=start, end=end, pieces=min(day.blocks, pieces))
    ]


def _shares(partitions: int | None, sizes: Sequence[int], of_bytes: Sequence[int]) -> list[int]:
    """Return how many tasks each part gets: at least one, and together about as many as are wanted.

    The borders are rounded, not the shares, whose sum would be another number.
    """
    if partitions is None:
        return [max(1, round(size / BYTES_PER_TASK)) for size in of_bytes]
    total = sum(sizes) or 1
    borders = [round(partitions * passed / total) for passed in accumulate(sizes, initial=0)]
    return [max(1, end - start) for start, end in pairwise(borders)]


def _tasks(day: Day, read: Read, *, start: datetime | None, end: datetime, pieces: int) -> Iterator[Task]:
    """Divide a day into ranges of blocks, each of which is read once: there is no index to find ids by.

    The last range is open: whatever block a row of that time lies in, one task has it.
    """
    for piece in range(pieces):
        first, beyond = (day.blocks * border // pieces for border in (piece, piece + 1))
        where = [
            SQL("message.sent_at >= {} AND message.sent_at < {}").format(
                Literal(day.first if start is None else max(day.first, start)), Literal(min(day.next, end))
            ),
            SQL("message.ctid >= {}::tid").format(Literal(f"({first},0)")),
        ]
        if piece + 1 < pieces:
            where.append(SQL("message.ctid < {}::tid").format(Literal(f"({beyond},0)")))
        statement = read.where(*(each.as_string() for each in where))
        check = IS_UNCHANGED.format(part=Literal(day.part), filenode=Literal(day.filenode))
        yield Task(statement, f"day {day.first:%Y-%m-%d}", check.as_string())


def divide_log(parts: Sequence[Blocks], read: Read, end: datetime, start: datetime) -> list[Task]:
    """Divide the rows of the log that were sent from `start` until just before `end` into ranges of ids."""
    table = Identifier(read.options.outbox_schema, "message_state")
    of_log = replace(read, select=select(read.schema, table, fails_fast=read.options.fails_fast).as_string())
    blocks = [part.last + 1 - part.first for part in parts]
    wanted = _shares(read.options.partitions, blocks, [part.bytes for part in parts])
    return [
        task
        for part, number, pieces in zip(parts, blocks, wanted, strict=True)
        for task in _tasks_of_log(part, of_log, start=start, end=end, pieces=min(number, pieces))
    ]


def _tasks_of_log(part: Blocks, read: Read, *, start: datetime, end: datetime, pieces: int) -> Iterator[Task]:
    blocks = part.last + 1 - part.first
    for piece in range(pieces):
        first, beyond = (part.first + blocks * border // pieces for border in (piece, piece + 1))
        where = SQL(
            "message.block >= {} AND message.block < {} AND message.id >= {} AND message.id < {}"
            " AND message.sent_at >= {} AND message.sent_at < {}"
        ).format(*map(Literal, (first, beyond, first << BLOCK_BITS, beyond << BLOCK_BITS, start, end)))
        check = IS_UNCHANGED.format(part=Literal(part.part), filenode=Literal(part.filenode))
        yield Task(read.where(where.as_string()), part.name, check.as_string())
