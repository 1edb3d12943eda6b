"""`maxPending`: a write waits for the relay, outside of any transaction, and not without end."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.commit import commit_batch
from outbox_spark.load import load
from outbox_spark.pieces import write_piece
from outbox_spark.plan import Save
from outbox_spark.prepare import prepare
from relay.testing.servers.process import wait_for
from tests.spark.frames import counts, invoices, one, save
from tests.spark.releases import SAVE_FAILS, arrow_table

Options = dict[str, str]
PENDING = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload)
    SELECT 'customer', 'InvoiceIssued', '{}' FROM generate_series(1, 10)
"""
WAITING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'outbox-spark' AND datname = current_database() AND state = 'idle'
        AND query LIKE '%AS pending%'
"""
MANNERS = pytest.mark.parametrize("manner", [{}, {"singleTask": "true"}], ids=["staged", "single-task"])


@MANNERS
def test_a_write_waits_until_the_relay_has_caught_up(
    spark: SparkSession, options: Options, connection: psycopg.Connection, manner: Options
) -> None:
    connection.execute(PENDING)
    frame = invoices(spark, partitions=1)
    plan, _ = prepare({**options, **manner, "maxPending": "9"}, frame.schema, overwrite=False)
    rows = arrow_table(frame).to_batches()

    with ThreadPoolExecutor() as threads:
        writing = threads.submit(_write, plan, rows)
        try:
            wait_for(lambda: one(connection, WAITING) == 1 or writing.done(), "the write waits", 20)
            assert not writing.done()
            assert counts(connection)[:2] == (0, 10)
        finally:
            connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now()")
        writing.result(60)

    assert counts(connection)[:2] == (100, 110)


@MANNERS
def test_a_relay_that_does_not_catch_up_fails_the_batch(
    spark: SparkSession, options: Options, connection: psycopg.Connection, manner: Options
) -> None:
    connection.execute(PENDING)

    with pytest.raises(SAVE_FAILS) as refused:
        save(invoices(spark, partitions=1), options, **manner, maxPending="9", maxPendingWait="1")

    assert "more than 9 rows (maxPending) have been pending for 1 s" in str(outbox_spark.reason(refused.value))
    assert counts(connection)[:2] == (0, 10)


def _write(plan: Save, rows: list[object]) -> None:
    if plan.pieces is not None:
        write_piece(plan, plan.pieces, rows, partition=0, attempt=0)
    else:
        commit_batch([(plan, [load(plan, rows, partition=0, attempt=0)])])
