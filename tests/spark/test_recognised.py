"""A batch that is in the ledger already: skipped or refused, and told through the log and as a result."""

import logging

import psycopg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

import outbox_spark
from outbox_spark import OutboxBatch
from outbox_spark.prepare import prepare, prepare_stream
from outbox_spark.source import OutboxWriter
from tests.spark.frames import counts, invoices
from tests.spark.one_row import ROWS, write_one_row

Options = dict[str, str]
NAME = {"txnAppId": "nightly", "txnVersion": "7"}
FAIL = {**NAME, "onRecognised": "fail"}


@pytest.mark.parametrize("how", [{}, {"singleTask": "true"}], ids=["staged", "single-task"])
def test_a_save_says_whether_it_wrote_or_recognised_its_batch(
    options: Options, caplog: pytest.LogCaptureFixture, how: Options
) -> None:
    caplog.set_level(logging.INFO, "outbox_spark")

    for _ in range(2):
        write_one_row({**options, **NAME, **how}, 1)

    written, recognised = caplog.records
    assert written.getMessage() == "outbox: batch 'nightly' version 7 written: 1 rows, 1 events"
    assert recognised.getMessage().startswith("outbox: batch 'nightly' version 7 recognised: 1 rows, 1 events, in the")


def test_a_recognised_batch_fails_where_that_is_asked(options: Options, connection: psycopg.Connection) -> None:
    for how in ({}, {"singleTask": "true"}):
        given = {**options, **FAIL, "txnAppId": f"nightly{len(how)}"}
        connection.execute("DELETE FROM billing.invoice")
        write_one_row({**given, **how}, 1)
        with pytest.raises(outbox_spark.BatchError) as refused:
            prepare({**given, **how}, from_arrow_schema(ROWS), overwrite=False)
        assert "version 7 recognised: 1 rows, 1 events, in the ledger before this run, and onRecognised is fail" in str(
            refused.value
        )


def test_a_batch_that_another_driver_wrote_meanwhile_fails_where_that_is_asked(
    options: Options, connection: psycopg.Connection
) -> None:
    late, _ = prepare({**options, **FAIL}, from_arrow_schema(ROWS), overwrite=False)
    write_one_row({**options, **NAME}, 1)

    with pytest.raises(outbox_spark.BatchError, match="in the ledger before this run, and onRecognised is fail"):
        OutboxWriter(late, is_recognised=False).commit([])

    assert counts(connection) == (1, 1, 1)


def test_a_batch_of_several_tables_fails_where_that_is_asked(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    def write() -> OutboxBatch:
        with OutboxBatch(spark, url=options["url"], app_id="nightly", version=7, on_recognised="fail") as batch:
            batch.rows(invoices(spark), table="billing.invoice")
        return batch

    result = write().result
    with pytest.raises(outbox_spark.BatchError, match="100 rows, 0 events, in the ledger before this run, and onReco"):
        write()

    assert str(result) == "batch 'nightly' version 7 written: 100 rows, 0 events"
    assert counts(connection) == (100, 0, 1)


def test_a_stream_cannot_fail_at_what_spark_repeats(options: Options) -> None:
    with pytest.raises(outbox_spark.OptionError, match="onRecognised is not for a stream: after a crash Spark repeats"):
        prepare_stream({**options, **FAIL, "txnVersion": ""}, from_arrow_schema(ROWS), overwrite=False)
