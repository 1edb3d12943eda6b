"""Written once, whatever happens to tasks, drivers and staging tables on the way."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.load import load
from outbox_spark.prepare import prepare
from outbox_spark.source import Attempt, OutboxWriter
from relay.testing.servers.process import Process, wait_for
from tests.spark import faulty
from tests.spark.frames import (
    LOADING,
    REFUSE_NEW_TABLES,
    WAITING_FOR_LOCK,
    counts,
    invoices,
    one,
    register,
    save,
    staging_tables,
)
from tests.spark.releases import SAVE_FAILS, arrow_table

ROOT = Path(__file__).resolve().parents[2]
BATCH = {"txnAppId": "nightly", "txnVersion": "7"}
CHANGED = {"upsertKeys": "invoice_id", "onlyChanged": "true"}
SESSIONS = """
    SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-spark' AND datname = current_database()
"""
SUMS = """
    SELECT (SELECT sum(amount) FROM billing.invoice), (SELECT sum((payload->>'amount')::numeric) FROM outbox.message)
"""


def test_tasks_that_fail_after_loading_are_tried_again_and_count_once(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    register(spark, faulty.FailsAfterLoading)

    save(invoices(spark), options, source="outbox-fails-after-loading")

    assert counts(connection) == (100, 100, 1)
    assert staging_tables(connection) == []


def test_of_twin_attempts_the_winner_alone_counts(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    register(spark, faulty.HasTwins)

    save(invoices(spark), options, source="outbox-has-twins")

    assert counts(connection) == (100, 100, 1)
    assert one(connection, "SELECT count(DISTINCT message_id) FROM outbox.message") == 100
    assert staging_tables(connection) == []


def test_a_batch_run_again_stages_and_writes_nothing(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    save(invoices(spark), options, **BATCH)
    connection.execute(REFUSE_NEW_TABLES)

    for _ in range(2):
        save(invoices(spark), options, **BATCH)

    assert counts(connection) == (100, 100, 1)
    assert one(connection, "SELECT row_counts->'repeats' FROM outbox.batch") == 2


def test_a_batch_run_again_is_announced_before_any_task(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    save(invoices(spark), options, **BATCH)

    outbox_spark.OutboxDataSource({**options, **BATCH}).writer(invoices(spark).schema, overwrite=False)

    (record,) = caplog.records
    assert "batch 'nightly' version 7 recognised: 100 rows, 100 events" in record.getMessage()


def test_without_a_name_each_save_is_a_batch_of_its_own(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    save(invoices(spark), options)

    with pytest.raises(SAVE_FAILS) as refused:
        save(invoices(spark), options)

    assert "duplicate key value violates unique constraint" in str(outbox_spark.reason(refused.value))
    assert counts(connection) == (100, 100, 1)
    assert staging_tables(connection) == []


def test_two_drivers_at_one_batch_write_it_once(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    register(spark, faulty.MeetsTwinDriver)

    save(invoices(spark), options, source="outbox-meets-twin-driver", **BATCH)

    assert counts(connection) == (0, 0, 1)  # the other one's, which wrote nothing in this test
    assert staging_tables(connection) == []


@pytest.mark.drills
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lock", "how"),
    [
        pytest.param("LOCK TABLE outbox.batch IN EXCLUSIVE MODE", {}, id="before-it-writes"),
        pytest.param("LOCK TABLE outbox.message IN SHARE MODE", {}, id="between-business-rows-and-events"),
        pytest.param("LOCK TABLE outbox.message IN SHARE MODE", CHANGED, id="of-changed-rows"),
    ],
)
def test_a_driver_killed_in_its_commit_leaves_nothing_and_its_batch_runs_again(
    spark: SparkSession,
    options: dict[str, str],
    connection: psycopg.Connection,
    tmp_path: Path,
    lock: str,
    how: dict[str, str],
) -> None:
    """A driver is killed inside its commit; nothing of its batch is written, and the batch can be run again."""
    with connection.transaction():
        connection.execute(lock)  # the driver stops at this point of its commit
        driver = Process(
            [sys.executable, "-m", "tests.spark.driver", json.dumps({**options, **BATCH, **how})],
            log=tmp_path / "driver.log",
            environment=os.environ,
            folder=ROOT,
        )
        try:
            driver.wait_until(lambda: _count(options["url"], WAITING_FOR_LOCK) == 1, 180)
        finally:
            driver.stop(signal.SIGKILL)
    wait_for(lambda: _count(options["url"], SESSIONS) == 0, "the killed driver's session ends", 30)
    assert counts(connection) == (0, 0, 0)
    assert len(staging_tables(connection)) == 4 + 1  # with their pattern

    save(invoices(spark), options, **BATCH, **how)

    assert counts(connection) == (100, 100, 1)
    ((invoiced, announced),) = connection.execute(SUMS).fetchall()
    assert invoiced == announced == sum(range(100)) + 11
    assert staging_tables(connection) == []


def test_a_staging_table_emptied_before_the_commit_is_noticed(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    register(spark, faulty.LosesStaging)

    with pytest.raises(SAVE_FAILS) as refused:
        save(invoices(spark), options, source="outbox-loses-staging", **BATCH)

    assert "partition 2 staged 25 rows and 0 reached billing.invoice" in str(outbox_spark.reason(refused.value))
    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []


def test_rows_that_a_trigger_holds_back_fail_the_batch(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    connection.execute("""
        CREATE FUNCTION hold_back() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER hold_back BEFORE INSERT ON billing.invoice
            FOR EACH ROW WHEN (NEW.quantity = 3) EXECUTE FUNCTION hold_back();
    """)

    with pytest.raises(SAVE_FAILS, match="staged 25 rows and 20 reached"):
        save(invoices(spark), options)

    assert counts(connection) == (0, 0, 0)


def test_an_attempt_that_loads_while_its_save_fails_leaves_no_staging(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    first, *rest = arrow_table(invoices(spark)).to_batches(10)
    failing, _ = prepare({**options, "batchsize": "10"}, invoices(spark).schema, overwrite=False)
    goes_on = Event()

    def slowly() -> Iterator[pa.RecordBatch]:
        yield first
        goes_on.wait(60)
        yield from rest

    with ThreadPoolExecutor() as threads:
        try:
            loading = threads.submit(load, failing, slowly(), partition=0, attempt=0)
            wait_for(lambda: one(connection, LOADING) == 1, "the attempt has staged some rows", 20)
            aborting = threads.submit(OutboxWriter(failing, is_recognised=False).abort, [])
            wait_for(lambda: one(connection, WAITING_FOR_LOCK) == 1 or aborting.done(), "the abort waits for it", 20)
        finally:
            goes_on.set()
    assert (loading.result().rows, aborting.result()) == (100, None)
    assert staging_tables(connection) == []

    late = load(failing, [first], partition=1, attempt=1)
    assert late.is_left_out
    assert staging_tables(connection) == []
    with pytest.raises(outbox_spark.BatchError, match="its staging tables were dropped while it ran"):
        OutboxWriter(failing, is_recognised=False).commit([Attempt(late)])
    assert counts(connection) == (0, 0, 0)


def test_old_staging_of_dead_batches_is_dropped_and_nothing_else(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    now = one(connection, "SELECT extract(epoch FROM now())::bigint")
    old, young = f"staging_{now - 100}_0123456789ab_0123456789_1", f"staging_{now}_0123456789ab_0123456789_1"
    for table in (old, young, "staging_of_somebody_else"):
        connection.execute(f"CREATE TABLE outbox.{table} ()")

    save(invoices(spark), options, stagingMaxAge="90")

    assert sorted(staging_tables(connection)) == [young, "staging_of_somebody_else"]


def _count(url: str, query: str) -> int:
    with psycopg.connect(url) as connection:
        count: int = one(connection, query)
        return count
