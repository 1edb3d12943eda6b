"""Archived days go out again through the outbox: the same messages, as new pending rows, all of them or no row."""

import asyncio
import json
import shutil
from collections.abc import Callable
from datetime import date, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from outbox_spark.archiving.archive import archive_day
from outbox_spark.archiving.replay import Wanted, rows_of, write_again
from outbox_spark.errors import ReadError
from relay.config.settings import DatabaseSettings
from relay.retention.kind import SENT
from relay.retention.rounds import drop_old_days
from tests.spark.frames import one
from tests.spark.running import call_job_on, refused
from tests.spark.sent import add_sent

DAY, NEXT_DAY = date(2026, 11, 1), date(2026, 11, 2)
JOB = "replay.py"
MESSAGES = """
    SELECT message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key,
        coalesce(headers, '{}') - 'x-replay-id' - 'x-replayed-at', content_type,
        payload::text, payload_bytes, created_at, trace_context
    FROM outbox.message WHERE state = %s ORDER BY id
"""
PENDING = "SELECT count(*) FROM outbox.message WHERE state = 'pending'"
Replay = Callable[[Wanted], tuple[int, int]]


@pytest.fixture
def replay(spark: SparkSession, connection: psycopg.Connection, database_url: str, tmp_path: Path) -> Replay:
    """Have one day in the archive alone, another one in the table alone; and write again what is wanted."""
    add_sent(connection, str(DAY), 40)
    connection.execute("UPDATE outbox.message SET exchange = '', routing_key = 'a', trace_context = '{}' WHERE id = 2")
    add_sent(connection, str(NEXT_DAY), 5)

    def run(wanted: Wanted) -> tuple[int, int]:
        rows = rows_of(spark, connection, wanted, url=database_url, outbox_schema="outbox")
        return write_again(connection, rows, wanted, made_by="me@here", outbox_schema="outbox")

    archive_day(spark, connection, DAY, str(tmp_path), url=database_url, outbox_schema="outbox")
    return run


def test_the_same_messages_are_pending_again_in_their_order(connection: psycopg.Connection, replay: Replay) -> None:
    sent = connection.execute(MESSAGES, ["sent"]).fetchall()
    connection.execute("DROP TABLE outbox.message_sent_20261101")

    done = replay(Wanted(days=[DAY, NEXT_DAY]))

    assert done == (1, 45)
    assert connection.execute(MESSAGES, ["pending"]).fetchall() == sent
    assert connection.execute(
        "SELECT DISTINCT writer, available_at, attempts FROM outbox.message WHERE state = 'pending'"
    ).fetchall() == [("replay 1", None, 0)]
    headers = connection.execute("SELECT DISTINCT headers FROM outbox.message WHERE state = 'pending'").fetchall()
    assert {each["x-replay-id"] for (each,) in headers} == {1}
    assert all(datetime.fromisoformat(each["x-replayed-at"]).tzinfo for (each,) in headers)
    audit = "SELECT state, selected, done, made_by, filter ->> 'since', filter ->> 'until' FROM outbox.job"
    assert connection.execute(audit).fetchall() == [
        ("done", 45, 45, "me@here", "2026-11-01T00:00:00+00:00", "2026-11-03T00:00:00+00:00")
    ]


def test_rows_are_selected_sent_elsewhere_and_spread_over_time(connection: psycopg.Connection, replay: Replay) -> None:
    elsewhere = {"to_exchange": "rebuild", "routing_key": "k"}

    done = replay(Wanted(days=[DAY], event_type="InvoicePaid", aggregate_id="C1", **elsewhere, rate=0.5))

    rows = connection.execute(
        "SELECT exchange, routing_key, payload::text LIKE '%Ü-%', available_at FROM outbox.message "
        "WHERE state = 'pending' ORDER BY id"
    ).fetchall()
    assert done == (1, 3)
    assert [row[:3] for row in rows] == [("rebuild", "k", True), ("rebuild", "k", None), ("rebuild", "k", True)]
    assert [later[3] - earlier[3] for earlier, later in pairwise(rows)] == [timedelta(seconds=2)] * 2


def test_what_is_refused_leaves_nothing_behind(connection: psycopg.Connection, replay: Replay) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        replay(Wanted(days=[DAY], routing_key="k" * 256))

    assert (one(connection, PENDING), one(connection, "SELECT count(*) FROM outbox.job")) == (0, 0)


def test_a_day_that_is_nowhere_is_told(connection: psycopg.Connection, replay: Replay) -> None:
    with pytest.raises(ReadError, match="2020-01-01: neither archived nor kept by the table, or not over yet"):
        replay(Wanted(days=[date(2020, 1, 1), DAY]))


def test_an_archive_that_has_lost_files_is_told(connection: psycopg.Connection, replay: Replay, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / f"day={DAY}" / "event_type=InvoicePaid")

    with pytest.raises(ReadError, match=rf"2026-11-01 below {tmp_path} has 27 rows, and 40 are noted\. .* --again"):
        replay(Wanted(days=[DAY], event_type="InvoiceIssued"))

    assert one(connection, PENDING) == 0


def test_retention_keeps_a_day_that_is_read_from_the_table(
    spark: SparkSession, connection: psycopg.Connection, database_url: str, replay: Replay, database: DatabaseSettings
) -> None:
    rows = rows_of(spark, connection, Wanted(days=[NEXT_DAY]), url=database_url, outbox_schema="outbox")

    asyncio.run(drop_old_days(database, {SENT: 1}))

    assert rows.count() == 5


@pytest.mark.timeout(300)
def test_the_job_counts_before_it_writes(
    spark: SparkSession, database_url: str, connection: psycopg.Connection
) -> None:
    add_sent(connection, str(DAY), 6)
    arguments = ["--url", database_url, "--day", str(DAY), "--event-type", "InvoicePaid"]

    counted = call_job_on(spark, JOB, *arguments, "--dry-run")
    untouched = one(connection, PENDING)
    written = call_job_on(spark, JOB, *arguments)

    assert json.loads(counted.stdout) == {"dry_run": True, "rows": {"InvoicePaid": 2}}
    assert untouched == 0
    assert json.loads(written.stdout) == {"dry_run": False, "replay": 1, "rows": 2}
    assert one(connection, PENDING) == 2
    refused(JOB, 2, "takes rows a second", *arguments, "--rate", "0")
