"""What the driver decides of a read before any task runs: the SELECT, the picture that all tasks see, and the tasks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg
from psycopg.sql import SQL, Composable, Identifier, Literal
from pyspark.sql.types import StructType

from outbox_spark.asked import ReadOptions, read_options
from outbox_spark.connection import connect, conninfo
from outbox_spark.errors import ReadError, TableError, one_line
from outbox_spark.options import SENT
from outbox_spark.reading.columns import select
from outbox_spark.reading.tasks import Read, Task

BYTES_PER_TASK = 128 * 1024 * 1024
MARKS_MAY_TAKE = 60.0  # seconds
MARK_POLL = 0.02  # seconds

# Marks that had begun before carry a time before the picture's, and may not be visible yet. They hold this lock, since
# a mark is the first statement of its transaction.
MARKING = SQL("""
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = to_regclass({sent})
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
    with connect(read.info) as connection, naming_role(schema):
        moment = settled_moment(connection, schema)
        days = list_days(connection, schema, SQL("first < {}").format(Literal(moment)), *_days(read.options))
    return divide(days, read, moment)


@contextmanager
def naming_role(schema: str) -> Iterator[None]:
    """Yield, and name the role that has the rights of a reader.

    Raises:
        TableError: the user lacks them.
    """
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise TableError(f"{one_line(error)}: give the role of url what {schema}_archive has") from None


def list_days(connection: psycopg.Connection, schema: str, *wanted: Composable) -> list[Day]:
    """Return the days of sent rows for which all of these conditions hold, the oldest first."""
    all_wanted = SQL(" AND ").join((SQL("true"), *wanted))
    statement = LIST_DAYS.format(sent=Literal(f"{schema}.message_sent"), wanted=all_wanted)
    connection.execute("SET TimeZone = 'UTC'")  # bounds are read as moments, be they dates or moments themselves
    return [Day(*row) for row in connection.execute(statement)]


def settled_moment(connection: psycopg.Connection, schema: str) -> datetime:
    """Return the database's time, in UTC, once every mark that carries an earlier one has ended.

    Raises:
        TableError: there is no outbox.
        ReadError: a mark does not end.
    """
    sent = Literal(f"{schema}.message_sent")
    statement = MARKING.format(sent=sent)
    ((exists, moment),) = connection.execute(
        SQL("SELECT to_regclass({}) IS NOT NULL, clock_timestamp()").format(sent)
    ).fetchall()
    if not exists:
        raise TableError(
            f"table {schema}.message of option outboxSchema does not exist in database {connection.info.dbname!r}: "
            "run `relay migrate` on it"
        )
    give_up_at = time.monotonic() + MARKS_MAY_TAKE
    begun = set(connection.execute(statement).fetchall())
    while begun := begun & set(connection.execute(statement).fetchall()):
        if time.monotonic() > give_up_at:
            raise ReadError(f"{len(begun)} transactions that mark rows have not ended for {MARKS_MAY_TAKE:g} s")
        time.sleep(MARK_POLL)
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


def divide(days: Sequence[Day], read: Read, end: datetime, start: datetime | None = None) -> list[Task]:
    """Divide what these days have of the time from `start` until just before `end`."""
    return [
        task
        for day in days
        for task in _tasks(day, read, start=start, end=end, all_bytes=sum(each.bytes for each in days))
    ]


def _tasks(day: Day, read: Read, *, start: datetime | None, end: datetime, all_bytes: int) -> Iterator[Task]:
    """Divide a day into ranges of blocks, each of which is read once: there is no index to find ids by.

    The last range is open: whatever block a row of that time lies in, one task has it.
    """
    per_task = BYTES_PER_TASK if read.options.num_partitions is None else all_bytes / read.options.num_partitions
    pieces = min(day.blocks, max(1, round(day.bytes / per_task)))
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
        yield Task(statement, f"{day.first:%Y-%m-%d}", check.as_string())
