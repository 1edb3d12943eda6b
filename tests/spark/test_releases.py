"""What a release of Spark lacks: bridged, or refused by name."""

from datetime import UTC, datetime

import psycopg
import pytest
from pyspark.sql.types import LongType, StructType

from outbox_spark import OptionError, OutboxDataSource
from outbox_spark.reading.plan import plan_read
from outbox_spark.reading.stream import OutboxStreamReader
from outbox_spark.spark_api import Remembering
from tests.spark.releases import with_limits, without_limits
from tests.spark.sent import add_sent

DAY, NEXT_DAY = "2026-11-01", "2026-11-02"
ID = StructType().add("id", LongType())
ROWS = [1, 2, 3, 4, 5]
LIMITS = {"maxrowspertrigger": "5", "maxtimepertrigger": "1h"}


def remembering(url: str) -> Remembering:
    return Remembering(OutboxStreamReader(plan_read({"url": url}, ID, is_stream=True)))


def test_a_reader_that_is_not_told_where_it_stands_goes_on_from_what_was_read(
    connection: psycopg.Connection, database_url: str
) -> None:
    add_sent(connection, DAY, 5)
    reader = remembering(database_url)

    first = reader.latestOffset()
    tasks = reader.partitions(reader.initialOffset(), first)

    assert sorted(row for task in tasks for batch in reader.read(task) for row in batch["id"].to_pylist()) == ROWS
    assert reader.latestOffset() == first  # without a row since: no micro-batch


def test_a_restarted_reader_goes_on_from_the_offset_that_spark_shows_it(
    connection: psycopg.Connection, database_url: str
) -> None:
    add_sent(connection, DAY, 5)
    today = {"sentBefore": datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0).isoformat()}
    reader = remembering(database_url)

    reader.partitions(today, today)

    assert reader.latestOffset() == today  # without a row since: no micro-batch


@without_limits
def test_limits_are_refused_where_a_trigger_would_end_after_the_first_micro_batch(database_url: str) -> None:
    source = OutboxDataSource({"url": database_url, **LIMITS})

    with pytest.raises(OptionError) as refused:
        source.streamReader(ID)

    for option in ("maxRowsPerTrigger", "maxTimePerTrigger"):
        assert f"option {option} needs Spark 4.2 or later, and this is Spark 4." in str(refused.value)


@with_limits
def test_limits_are_taken_where_spark_holds_them(connection: psycopg.Connection, database_url: str) -> None:
    assert isinstance(OutboxDataSource({"url": database_url, **LIMITS}).streamReader(ID), OutboxStreamReader)
