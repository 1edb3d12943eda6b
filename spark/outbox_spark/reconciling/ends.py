"""The ends that a reconciliation compares: business rows, events of outbox and archive, and what a consumer applied."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import reduce

import psycopg
from psycopg.sql import SQL, Identifier, Literal
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_spark.archiving.archive import read_noted
from outbox_spark.archiving.ledger import ArchivedDay, archived_days
from outbox_spark.connection import connect, conninfo
from outbox_spark.errors import ReadError
from outbox_spark.reading.plan import list_days, settled_moment
from outbox_spark.reading.table import Database, one_moment, read_table

MONEY = "decimal(38, 6)"
EVENTS = "id long, message_id string, event_type string, sent_at timestamp, payload string, written_as string"
AS_TEXT = {"message_id": SQL("message_id::text"), "payload": SQL("payload::text")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is compared with what."""

    url: str
    outbox_schema: str
    table: Identifier
    key_column: str
    amount_column: str
    day_column: str
    event_types: Sequence[str]
    payload_key: str
    payload_amount: str
    payload_day: str
    since: date | None
    until: date | None
    archive: str | None
    inbox_url: str
    inbox_schema: str
    consumer: str | None
    grace: float


@dataclass(frozen=True, slots=True)
class Ends:
    """What there is to compare, all of it as it was at one moment."""

    moment: datetime
    kept_from: date  # from then on table and archive have every day that was sent
    kept: Sequence[date]  # what the table had of them
    rows: DataFrame  # key, day, amount
    events: DataFrame  # every row of the outbox, of any type and in any state
    applied: DataFrame | None  # inbox_id, processed_at


@contextmanager
def ends(spark: SparkSession, question: Question) -> Iterator[Ends]:
    """Read the ends.

    A business row and its event are written in one transaction. So that each is seen with the other, one snapshot is
    read for business rows and unsent events. It is held until they are on Spark's disks. Sent rows need no snapshot:
    those sent before a moment are the same ones whenever they are read.
    """
    info, schema = conninfo(question.url), question.outbox_schema
    with connect(info) as connection:
        moment = settled_moment(connection, schema)
        kept = _kept(connection, schema)
        archived = _dropped(connection, question, kept)
    with one_moment(question.url) as database:
        rows, unsent = _rows(spark, database, question), _unsent(spark, database, question, moment)
        # One by one: Spark takes a union apart, and would read its parts again, when the snapshot is gone.
        seen = [frame.persist(StorageLevel.DISK_ONLY) for frame in (rows, *unsent)]
        for frame in seen:
            frame.count()
    try:
        sent = [_sent(spark, question, moment), *_archived(spark, archived)]
        events = reduce(DataFrame.unionByName, [*unsent, *sent])
        kept_from = _without_gap([*(each.day for each in archived), *kept])
        yield Ends(moment, kept_from, kept, rows, events, _applied(spark, question))
    finally:
        for frame in seen:
            frame.unpersist()


def check_days(ends: Ends, question: Question) -> None:
    """Make sure that a comparison, once it was computed, had all days: Spark reads those of the table after a while.

    Raises:
        ReadError: one was dropped meanwhile, so that its rows may show as differences.
    """
    with connect(conninfo(question.url)) as connection:
        gone = sorted(set(ends.kept) - set(_kept(connection, question.outbox_schema)))
    if gone:
        raise ReadError(f"day {', '.join(map(str, gone))} of the outbox was dropped meanwhile: run it again")


def _kept(connection: psycopg.Connection, schema: str) -> list[date]:
    return [each.first.date() for each in list_days(connection, schema, SQL("first <= now()"))]


def _dropped(connection: psycopg.Connection, question: Question, kept: Sequence[date]) -> list[ArchivedDay]:
    """Return the days that the archive alone has, if there is one to be read.

    Raises:
        ReadError: one lies elsewhere.
    """
    if question.archive is None:
        return []
    archived = archived_days(connection, question.outbox_schema)
    dropped = [each for day, each in archived.items() if day not in kept]
    for each in dropped:
        if not f"{each.path.rstrip('/')}/".startswith(f"{question.archive.rstrip('/')}/"):
            raise ReadError(
                f"{each.day} was archived below {each.path}, not below {question.archive} as --archive says"
            )
    return dropped


def _rows(spark: SparkSession, database: Database, question: Question) -> DataFrame:
    day = Identifier(question.day_column)
    borders = [SQL("{} {} {}").format(day, SQL(sign), Literal(border)) for sign, border in _borders(question)]
    return read_table(
        spark,
        database,
        question.table,
        f"key string, day date, amount {MONEY}",
        computed={
            "key": SQL("{}::text").format(Identifier(question.key_column)),
            "day": SQL("{}::date").format(day),
            "amount": SQL("{}::numeric").format(Identifier(question.amount_column)),
        },
        where=SQL(" AND ").join([SQL("true"), *borders]),
    )


def _unsent(spark: SparkSession, database: Database, question: Question, moment: datetime) -> list[DataFrame]:
    """Read what was not sent before the moment; what has been sent since is left out by the read of sent rows."""
    message = Identifier(question.outbox_schema, "message")
    # Two conditions, each of which names its partitions.
    conditions = [SQL("state <> 'sent'"), SQL("state = 'sent' AND sent_at >= {}").format(Literal(moment))]
    return [read_table(spark, database, message, EVENTS, computed=AS_TEXT, where=where) for where in conditions]


def _sent(spark: SparkSession, question: Question, moment: datetime) -> DataFrame:
    options = {"url": question.url, "outboxSchema": question.outbox_schema}
    return spark.read.format("outbox").options(**options).load(schema=EVENTS).where(f.col("sent_at") < f.lit(moment))


def _archived(spark: SparkSession, days: Sequence[ArchivedDay]) -> list[DataFrame]:
    columns = [each.split()[0] for each in EVENTS.split(", ")]
    return [read_noted(spark, day).select(*columns) for day in days]


def _applied(spark: SparkSession, question: Question) -> DataFrame | None:
    if question.consumer is None:
        return None
    return read_table(
        spark,
        Database(conninfo(question.inbox_url)),
        Identifier(question.inbox_schema, "processed_message"),
        "inbox_id string, processed_at timestamp",
        computed={"inbox_id": SQL("message_id::text")},
        where=SQL("consumer_name = {}").format(Literal(question.consumer)),
    )


def _borders(question: Question) -> list[tuple[str, date]]:
    both = ((">=", question.since), ("<=", question.until))
    return [(sign, border) for sign, border in both if border is not None]


def announced(ends: Ends, question: Question) -> DataFrame:
    """Return what the events tell of each key: the latest one counts, as an invoice may have been corrected."""
    names = {"key": question.payload_key, "day": question.payload_day, "amount": question.payload_amount}
    kinds = {"key": "string", "day": "date", "amount": MONEY}
    fields = f.from_json("payload", ", ".join(f"`{names[name]}` {kinds[name]}" for name in names))
    told = ends.events.where(f.col("event_type").isin(*question.event_types)).withColumn("told", fields)
    values = [f.col("told").getField(names[name]).alias(name) for name in names]
    events = told.select("id", "message_id", *values)
    for sign, border in _borders(question):
        events = events.where(f.col("day").isNull() | f.expr(f"day {sign} date'{border}'"))
    # Those without a key stay apart: each is a difference.
    apart = f.coalesce("key", f.concat(f.lit("\0"), "message_id"))
    latest = f.max_by(f.struct("id", "message_id", "key", "day", "amount"), "id").alias("latest")
    return events.groupBy(apart.alias("apart")).agg(latest).select("latest.*")


def _without_gap(days: Sequence[date]) -> date:
    """Return the day from which on no day is missing."""
    if not days:
        raise ReadError("the outbox has no day of sent rows")
    every = set(days)
    first = max(every)
    while first - timedelta(days=1) in every:
        first -= timedelta(days=1)
    return first


def judged_from(ends: Ends, grace: float) -> datetime:
    """Return from when on an applied message must have a row. An earlier row may be of a day that was dropped."""
    midnight = datetime(ends.kept_from.year, ends.kept_from.month, ends.kept_from.day, tzinfo=UTC)
    return midnight + timedelta(seconds=grace)
