"""`spark.readStream.format("outbox")`: each sent row in one micro-batch, through restarts; or the query fails."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StructType, TimestampType

import outbox_spark
from outbox_spark.errors import OptionError, ReadError
from outbox_spark.reading.plan import plan_read
from outbox_spark.reading.stream import BEHIND, Offset, OutboxStreamReader
from outbox_spark.spark_api import ReadAllAvailable
from relay.testing.servers.process import wait_for
from tests.spark.frames import one
from tests.spark.releases import with_sources
from tests.spark.sent import add_sent
from tests.support.days import make_days

MakeReader = Callable[..., OutboxStreamReader]
DAY, NEXT_DAY = "2026-11-01", "2026-11-02"
ID = StructType().add("id", LongType()).add("sent_at", TimestampType())
MOMENTS = [
    datetime.fromisoformat(f"{day}T{time}+00:00")
    for day in (DAY, "2026-11-03")
    for time in ("00:00:00", "00:00:00.000001", "00:00:02", "11:59:59", "12:00:01", "23:59:59.999999")
]
SEND_AT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT 'customer', 'C1', 'InvoiceIssued', '{}', 'sent', at FROM unnest(%s::timestamptz[]) AS at
"""
LONGEST = {"2": timedelta(seconds=2), "1h": timedelta(hours=1)}
SEND_NOW = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT 'customer', 'C1', 'InvoiceIssued', '{}', 'sent', now() FROM generate_series(1, %s)
"""
BEFORE = """
    SELECT count(*) FROM outbox.message
    WHERE sent_at >= date_trunc('day', %s::timestamptz - interval '1 hour', 'UTC') AND sent_at < %s
"""
AGE = "SELECT now() - max(sent_at) FROM outbox.message"


@pytest.fixture
def reader(database_url: str) -> MakeReader:
    """Make a reader of the ids."""

    def make(**options: str) -> OutboxStreamReader:
        return OutboxStreamReader(plan_read({"url": database_url, **options}, ID, is_stream=True))

    return make


def ids(reader: OutboxStreamReader, start: Offset, end: Offset) -> list[int]:
    tasks = reader.partitions(start, end)
    return sorted(row for task in tasks for batch in reader.read(task) for row in batch.column("id").to_pylist())


def walk(make: Callable[[], OutboxStreamReader]) -> Iterator[list[datetime]]:
    """Yield the moments of the rows of each micro-batch, by a query that is begun again for each."""
    begun = make().initialOffset()
    while (end := make().latestOffset(begun, make().getDefaultReadLimit())) != begun:
        assert end["sentBefore"] > begun["sentBefore"]
        tasks = make().partitions(begun, end)
        yield sorted(at for task in tasks for batch in make().read(task) for at in batch.column("sent_at").to_pylist())
        begun = end


def offset(moment: str) -> Offset:
    return {"sentBefore": f"{moment}+00:00"}


@with_sources
@pytest.mark.drills
def test_each_row_is_in_one_micro_batch_through_restarts(
    spark: SparkSession, connection: psycopg.Connection, database_url: str, tmp_path: Path
) -> None:
    """A stream is restarted twice, once after a crash before Spark's note; each row is in one micro-batch."""
    add_sent(connection, DAY, 40)
    first = _stream(spark, tmp_path, url=database_url)
    connection.execute(SEND_NOW, [5])
    wait_for(lambda: one(connection, AGE) > BEHIND, "the last rows are old enough", 60)
    second = _stream(spark, tmp_path, url=database_url)
    for note in (tmp_path / "commits").glob("*1*"):  # as after a crash before Spark's own note of the micro-batch
        note.unlink()
    third = _stream(spark, tmp_path, url=database_url)

    assert [*first, *second] == [0, 1]
    assert sorted(first[0] + second[1]) == list(range(1, 46))
    assert third[1] == second[1] != []
    assert third.get(2, []) == []


def test_a_micro_batch_is_the_rows_of_its_time_however_often_it_is_read(
    connection: psycopg.Connection, reader: MakeReader
) -> None:
    add_sent(connection, DAY, 30)  # one a second after midnight
    add_sent(connection, NEXT_DAY, 30)
    read = reader(numpartitions="3")

    first = offset(f"{DAY}T00:00:00"), offset(f"{DAY}T00:00:11")
    rest = first[1], offset(f"{NEXT_DAY}T00:00:06")

    assert ids(read, *first) == list(range(1, 11))
    assert ids(read, *rest) == ids(read, *rest) == list(range(11, 36))
    assert ids(read, rest[1], rest[1]) == []


def test_a_stream_begins_with_the_oldest_day_or_the_one_asked_for(
    connection: psycopg.Connection, reader: MakeReader
) -> None:
    add_sent(connection, DAY, 1)
    add_sent(connection, NEXT_DAY, 1)

    assert reader().initialOffset() == offset(f"{DAY}T00:00:00")
    assert reader(startingday=NEXT_DAY).initialOffset() == offset(f"{NEXT_DAY}T00:00:00")
    assert reader(startingday="2020-01-01").initialOffset() == offset(f"{DAY}T00:00:00")


def test_what_was_sent_a_moment_ago_waits_for_the_next_micro_batch(
    connection: psycopg.Connection, reader: MakeReader
) -> None:
    add_sent(connection, DAY, 1)
    connection.execute(SEND_NOW, [1])
    start = reader().initialOffset()

    end = reader().latestOffset(start, ReadAllAvailable())

    assert one(connection, "SELECT now()") - datetime.fromisoformat(end["sentBefore"]) >= BEHIND
    assert ids(reader(), start, end) == [1]


@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"maxrowspertrigger": "1"},
        {"maxrowspertrigger": "3"},
        {"maxtimepertrigger": "2"},
        {"maxrowspertrigger": "2", "maxtimepertrigger": "1h"},
    ],
    ids=str,
)
def test_a_stream_reads_each_row_once_whatever_brakes_it(
    connection: psycopg.Connection, reader: MakeReader, limit: dict[str, str]
) -> None:
    """Rows are drawn at few moments of three days, so that many share one, lie at a midnight or leave a day empty."""
    connection.execute(make_days("'2026-11-01'", "3"))
    most, span = int(limit.get("maxrowspertrigger", "1000")), LONGEST.get(limit.get("maxtimepertrigger", ""))
    draw = Random(str(limit))
    for _ in range(12):
        moments = sorted(draw.choices(MOMENTS, k=draw.randrange(12)))
        connection.execute("TRUNCATE outbox.message_sent")
        connection.execute(SEND_AT, [moments])

        batches = list(walk(lambda: reader(**limit)))

        assert [moment for batch in batches for moment in batch] == moments
        for batch in batches:
            assert len(batch) <= most or len(set(batch)) == 1
            assert span is None or not batch or batch[-1] - batch[0] <= span
            assert not limit or len({moment.date() for moment in batch}) <= 1


def test_a_stream_without_new_rows_stays_where_it_is_until_the_day_ends(
    connection: psycopg.Connection, reader: MakeReader
) -> None:
    connection.execute(make_days("(now() AT TIME ZONE 'UTC')::date - 2", "3"))
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)

    first = reader().latestOffset(reader().initialOffset(), ReadAllAvailable())

    assert first["sentBefore"] >= (today - BEHIND).isoformat()
    assert reader().latestOffset(first, ReadAllAvailable()) == first


def test_a_trigger_for_what_is_there_now_takes_no_later_row(connection: psycopg.Connection, reader: MakeReader) -> None:
    add_sent(connection, DAY, 5)
    read = reader(maxrowspertrigger="2")
    read.prepareForTriggerAvailableNow()
    read._until = datetime.fromisoformat(f"{DAY}T00:00:04+00:00")  # of five rows three are there

    batches, begun = [], read.initialOffset()
    while (end := read.latestOffset(begun, read.getDefaultReadLimit())) != begun:
        batches.append(ids(read, begun, end))
        begun = end

    assert batches == [[1, 2], [3]]


def test_a_clock_that_went_back_ends_the_stream(connection: psycopg.Connection, reader: MakeReader) -> None:
    ahead = {"sentBefore": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}

    with pytest.raises(ReadError, match=r"by the clock of the database it is .* The clock went back"):
        reader().latestOffset(ahead, ReadAllAvailable())


@pytest.mark.jobs
def test_rows_that_a_clock_puts_before_the_offset_end_the_stream(
    connection: psycopg.Connection, reader: MakeReader
) -> None:
    connection.execute("SELECT outbox.ensure_sent_days((now() AT TIME ZONE 'UTC')::date - 1, 1)")
    connection.execute(SEND_NOW, [3])
    wait_for(lambda: one(connection, AGE) > BEHIND, "the rows are old enough", 60)
    end = reader().latestOffset(reader().initialOffset(), ReadAllAvailable())
    assert reader().latestOffset(end, ReadAllAvailable()) == end
    connection.execute(SEND_NOW, [2])
    connection.execute("UPDATE outbox.message SET sent_at = sent_at - interval '1 minute' WHERE id > 3")

    with pytest.raises(ReadError, match="2 rows carry a time before"):
        reader().latestOffset(end, ReadAllAvailable())
    reader(failondataloss="false").latestOffset(end, ReadAllAvailable())


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_rows_before_an_offset_are_counted_alike_in_every_time_zone(
    connection: psycopg.Connection, reader: MakeReader, zone: str
) -> None:
    connection.execute(make_days("(now() AT TIME ZONE 'UTC')::date - 3", "3"))
    connection.execute(SEND_NOW, [60])
    connection.execute("UPDATE outbox.message SET sent_at = sent_at - id * interval '1 hour'")
    connection.execute(f"ALTER DATABASE {connection.info.dbname} SET TimeZone = '{zone}'".encode())

    end = reader().latestOffset(reader().initialOffset(), ReadAllAvailable())

    assert connection.execute(BEFORE, [end["sentBefore"]] * 2).fetchall() == [(end["rows"],)]
    assert reader().latestOffset(end, ReadAllAvailable()) == end


def test_days_that_are_gone_end_the_stream_unless_told_otherwise(
    connection: psycopg.Connection, reader: MakeReader
) -> None:
    add_sent(connection, NEXT_DAY, 5)
    gone = offset(f"{DAY}T12:00:00"), offset("2026-11-03T00:00:00")

    with pytest.raises(ReadError, match=f"the oldest day that the table keeps is {NEXT_DAY}"):
        ids(reader(), *gone)
    assert ids(reader(failondataloss="false"), *gone) == [1, 2, 3, 4, 5]


@with_sources
@pytest.mark.jobs
def test_a_database_without_an_outbox_is_told(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    with pytest.raises(PySparkException) as refused:
        _stream(spark, tmp_path, url=database_url, outboxSchema="elsewhere")

    assert str(outbox_spark.reason(refused.value)).startswith("table elsewhere.message of option outboxSchema does not")


def test_options_that_no_stream_can_have_are_refused(reader: MakeReader, database_url: str) -> None:
    with pytest.raises(OptionError) as refused:
        reader(state="pending", endingday=DAY, failondataloss="maybe")
    with pytest.raises(OptionError, match="failOnDataLoss is for a stream"):
        plan_read({"url": database_url, "failondataloss": "false"}, ID)

    for words in ("option state is not for a stream", "option endingDay is not", "failOnDataLoss takes true or false"):
        assert words in str(refused.value)


def _stream(spark: SparkSession, checkpoint: Path, **options: str) -> dict[int, list[int]]:
    """Read what was sent, and stop; give the ids by micro-batch."""
    found: dict[int, list[int]] = {}

    def keep(frame: DataFrame, number: int) -> None:
        found[number] = sorted(row.id for row in frame.select("id").collect())

    writing = spark.readStream.format("outbox").options(**options).load().writeStream.foreachBatch(keep)
    writing.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()
    return found
