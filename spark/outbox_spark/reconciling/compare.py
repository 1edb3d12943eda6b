"""What two ends differ in, joined by Spark: rows with events by key, events with an inbox by message id."""

from datetime import timedelta
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from outbox_spark.errors import ReadError
from outbox_spark.reconciling.ends import MONEY, Ends, Question, announced, judged_from

# In the words of `relay reconcile`, where it has them.
KINDS = {
    "without_event": "business rows of which no event tells",
    "without_row": "events without a business row",
    "unequal": "rows and events of one key that differ in amount or day",
    "missing": "sent before the grace period, and not in the inbox of the consumer",
    "lost": "in the inbox of the consumer, and no row has the message id",
}


def differences(ends: Ends, question: Question, both: DataFrame) -> DataFrame:
    """Return each difference with its kind."""
    found = [
        _kind("without_event", both.where("message_id IS NULL")),
        _kind("without_row", both.where("row_key IS NULL AND message_id IS NOT NULL")),
        _kind("unequal", both.where("row_key = key AND NOT (amount <=> event_amount AND day <=> event_day)")),
        *_against_inbox(ends, question),
    ]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), found)


def joined(ends: Ends, question: Question) -> DataFrame:
    """Put rows and events of one key side by side."""
    rows = ends.rows.withColumnRenamed("key", "row_key")
    events = announced(ends, question).withColumnsRenamed({"day": "event_day", "amount": "event_amount"})
    return rows.join(events, f.col("row_key") == f.col("key"), "full")


def check_keys(ends: Ends, question: Question) -> None:
    """Refuse a key column that does not tell rows apart: their events could not be told apart, either.

    Raises:
        ReadError: some value is that of several rows.
    """
    repeated = ends.rows.where("key IS NOT NULL").groupBy("key").count().where("count > 1").first()
    if repeated is not None:
        found = f"{repeated['count']} rows have {repeated['key']!r} there"
        raise ReadError(f"--key-column {question.key_column}: {found}, and a key has to tell one row from all others")


def sums_by_day(both: DataFrame) -> DataFrame:
    """Count and sum up both sides, each by its own day."""

    def side(name: str, key: str, day: str, amount: str) -> DataFrame:
        return (
            both.where(f"{key} IS NOT NULL")
            .groupBy(f.col(day).alias("day"))
            .agg(f.count("*").alias(name), f.sum(amount).cast(MONEY).alias(f"amount_of_{name}"))
        )

    rows, events = side("rows", "row_key", "day", "amount"), side("events", "message_id", "event_day", "event_amount")
    on = rows["day"].eqNullSafe(events["day"])
    counted = rows.join(events, on, "full").select(
        f.coalesce(rows["day"], events["day"]).alias("day"),
        *(f.coalesce(name, f.lit(0)).alias(name) for name in ("rows", "amount_of_rows", "events", "amount_of_events")),
    )
    return counted.withColumn("difference", f.col("amount_of_events") - f.col("amount_of_rows")).orderBy("day")


def _against_inbox(ends: Ends, question: Question) -> list[DataFrame]:
    if ends.applied is None:
        return []
    expected_until = ends.moment - timedelta(seconds=question.grace)
    expected = (
        ends.events.where(f.col("event_type").isin(*question.event_types) & (f.col("sent_at") < f.lit(expected_until)))
        .groupBy("message_id", "written_as")
        .agg(f.max("id").alias("id"), f.max("sent_at").alias("at"))
    )
    judged = f.col("at").between(f.lit(judged_from(ends, question.grace)), f.lit(expected_until))
    applied = ends.applied.withColumnRenamed("processed_at", "at")
    missing, lost = expected, applied.where(judged)
    for inbox_id in (f.col("message_id"), id_of_writer()):
        missing = missing.join(applied, inbox_id == f.col("inbox_id"), "left_anti")
        lost = lost.join(ends.events.select(inbox_id.alias("known")), f.col("inbox_id") == f.col("known"), "left_anti")
    return [_kind("missing", missing), _kind("lost", lost.withColumnRenamed("inbox_id", "message_id"))]


def id_of_writer() -> Column:
    """Return the id by which an inbox by writer knows an event (docs/decisions/0038-an-inbox-by-writer.md).

    Null where no role is known. Source: relay/outbox/identity.py, `id_of_writer`; tests compare both.
    """
    id_bytes = f.unhex(f.replace(f.col("message_id"), f.lit("-"), f.lit("")))
    hashed = f.sha2(f.concat(id_bytes, f.encode(f.nullif("written_as", f.lit("")), "UTF-8")), 256)
    pieces = [f.substring(hashed, place, length) for place, length in ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))]
    # Not concat_ws, which leaves out what is null.
    return f.concat(pieces[0], *(part for piece in pieces[1:] for part in (f.lit("-"), piece)))


def _kind(kind: str, frame: DataFrame) -> DataFrame:
    if "row_key" in frame.columns:
        frame = frame.withColumn("key", f.coalesce("row_key", "key")).drop("row_key")
    return frame.withColumn("kind", f.lit(kind))
