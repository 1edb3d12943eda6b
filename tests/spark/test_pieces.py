"""Each partition its own transaction: `atomic=partition`, and `singleTask`, whose one partition is the whole batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import outbox_spark
from outbox_spark.ledger import begin_pieces
from outbox_spark.pieces import write_piece
from outbox_spark.prepare import prepare
from relay.testing.servers.process import wait_for
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

Options = dict[str, str]
IN_FOUR = {"txnAppId": "nightly", "txnVersion": "7", "atomic": "partition", "numPartitions": "4"}
SINGLE = {"txnAppId": "nightly", "txnVersion": "7", "singleTask": "true"}
TRANSACTIONS = """
    SELECT count(DISTINCT xmin::text)
    FROM (SELECT xmin FROM billing.invoice UNION SELECT xmin FROM outbox.message_pending) AS every_row
"""
PIECES = "SELECT count(*) FROM outbox.batch WHERE partition >= 0"
COMPLETE = (100, 100, 4 + 2)  # with the pieces: how many there are, and that they are all written


@pytest.mark.every_postgres
def test_each_partition_is_a_transaction_of_its_own(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    connection.execute(REFUSE_NEW_TABLES)

    save(invoices(spark), options, **IN_FOUR, batchsize="10", exchange="", routingKey="q", contentType="text/json")

    assert counts(connection) == COMPLETE
    assert one(connection, TRANSACTIONS) == 4
    batch = outbox_spark.committed(options["url"], "nightly", 7)
    assert batch is not None
    assert batch.row_counts.pop("seconds") in range(300)
    assert (batch.partitions, batch.row_counts) == (4, {"rows": 100, "table": "billing.invoice", "messages": 100})
    fields = "aggregate_type, aggregate_id, event_type, exchange, routing_key, content_type, headers, writer, batch_id"
    (row,) = connection.execute(f"SELECT {fields} FROM outbox.message WHERE payload->>'invoice_id' = 'INV-40'")
    assert row == ("customer", "C5", "InvoiceIssued", "", "q", "text/json", None, "nightly", 7)


def test_what_cannot_work_by_itself_is_not_said_to_be_run_again(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    connection.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not on Sundays'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON outbox.batch FOR EACH ROW WHEN (NEW.partition = -1)
            EXECUTE FUNCTION refuse()
    """)

    for how in ({}, {"atomic": "partition", "numPartitions": "4"}):
        with pytest.raises(SAVE_FAILS) as refused:
            save(invoices(spark), options, txnAppId=f"nightly{len(how)}", txnVersion="7", **how)
        words = str(outbox_spark.reason(refused.value))
        assert "not on Sundays" in words
        assert "again" not in words


def test_a_rerun_writes_only_the_pieces_that_are_missing(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    good = f.col("invoice_id")
    broken = f.when(good == "INV-60", f.concat(good, f.lit("\0"))).otherwise(good)
    with pytest.raises(SAVE_FAILS, match="column 'invoice_id' holds a NUL character"):
        save(invoices(spark).withColumn("invoice_id", broken), options, **IN_FOUR)
    with connection.transaction():
        # One snapshot: the other tasks may still commit their pieces.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        written = one(connection, PIECES)
        assert counts(connection)[:2] == (25 * written, 25 * written)
    assert outbox_spark.committed(options["url"], "nightly", 7) is None
    first: dict[str, str] = dict(connection.execute("SELECT invoice_id, xmin::text FROM billing.invoice").fetchall())

    save(invoices(spark), options, **IN_FOUR)
    save(invoices(spark), options, **IN_FOUR)

    assert counts(connection) == COMPLETE
    assert one(connection, "SELECT count(DISTINCT message_id) FROM outbox.message") == 100
    now: dict[str, str] = dict(connection.execute("SELECT invoice_id, xmin::text FROM billing.invoice").fetchall())
    assert first.items() <= now.items()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"numPartitions": "2"}, "was begun in 4 pieces, of which 0 are written, and cannot go on in 2"),
        ({"singleTask": "true", "numPartitions": "1"}, "was begun in 4 pieces, of which 0 are written, and cannot"),
        ({"atomic": "batch"}, "of which 0 are written: run it again in the same way, with atomic=partition and num"),
    ],
)
def test_a_batch_begun_in_pieces_goes_on_in_these_alone(
    spark: SparkSession, options: Options, changed: Options, message: str
) -> None:
    schema = invoices(spark).schema
    prepare({**options, **IN_FOUR}, schema, overwrite=False)

    with pytest.raises(outbox_spark.BatchError) as refused:
        prepare({**options, **IN_FOUR, **changed}, schema, overwrite=False)

    assert message in str(refused.value)


def test_a_batch_begun_in_pieces_while_another_driver_stages_it_is_not_written_twice(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    register(spark, faulty.MeetsPieces)

    with pytest.raises(SAVE_FAILS, match="was begun in 3 pieces"):
        save(invoices(spark), options, source="outbox-meets-pieces", txnAppId="nightly", txnVersion="7")

    assert counts(connection) == (0, 0, 1)


def test_a_batch_that_is_committed_in_one_is_not_begun_in_pieces(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    save(invoices(spark), options, txnAppId="nightly", txnVersion="7")

    save(invoices(spark), options, **IN_FOUR)

    assert counts(connection) == (100, 100, 1)


@pytest.mark.jobs
def test_a_rerun_with_other_rows_but_as_many_is_refused_and_writes_nothing(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    connection.execute("CREATE TABLE billing.step (customer_id text, number integer)")
    given = {**options, **IN_FOUR, "numPartitions": "2", "dbtable": "billing.step"}
    steps = spark.range(0, 20, 1, 2)
    number = "CAST(id AS int) AS number"
    with pytest.raises(SAVE_FAILS, match="holds a NUL character"):
        save(steps.selectExpr(r"if(id = 15, 'C\0', 'C1') AS customer_id", number), given)
    wait_for(lambda: one(connection, PIECES) == 1, "the other partition is written", 60)

    with pytest.raises(SAVE_FAILS) as refused:
        save(steps.selectExpr("'C1' AS customer_id", "CAST(19 - id AS int) AS number"), given)

    assert "partition 0 of batch 'nightly' version 7 was written with 10 rows, and they are not the 10" in str(
        outbox_spark.reason(refused.value)
    )
    for numbers in ("number FROM billing.step", "(payload->>'number')::int FROM outbox.message"):
        assert connection.execute(f"SELECT {numbers} ORDER BY 1").fetchall() == [(n,) for n in range(10)]
    assert staging_tables(connection) == []


def test_a_piece_that_an_earlier_release_wrote_is_never_taken_for_the_same(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    frame = invoices(spark, partitions=1)
    save(frame, options, **SINGLE)
    connection.execute("DELETE FROM outbox.batch WHERE partition = -1")
    connection.execute("UPDATE outbox.batch SET row_counts = row_counts - 'checksum' WHERE partition = 0")

    with pytest.raises(SAVE_FAILS, match="by an earlier release, which noted no checksum to compare its rows by"):
        save(frame, options, **SINGLE)

    assert counts(connection)[:2] == (100, 100)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**IN_FOUR, "numPartitions": "3"}, "has more than the 3 partitions that this write takes"),
        ({**IN_FOUR, "numPartitions": "5"}, "has 4 of its 5 pieces: does the DataFrame have as many"),
        (SINGLE, "has more than the 1 partitions that this write takes"),
        ({"numPartitions": "3"}, "has more than the 3 partitions that this write takes"),
    ],
    ids=["more", "fewer", "single-task", "all-in-one"],
)
def test_a_frame_of_another_number_of_partitions_is_never_taken_for_the_batch(
    spark: SparkSession, options: Options, given: Options, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(SAVE_FAILS) as refused:
            save(invoices(spark), options, **given)
        assert message in str(outbox_spark.reason(refused.value))
        assert outbox_spark.committed(options["url"], "nightly", 7) is None


def test_twins_at_one_piece_write_it_once(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    first, *rest = arrow_table(invoices(spark)).to_batches(10)
    plan, _ = prepare({**options, **IN_FOUR, "batchsize": "10"}, invoices(spark).schema, overwrite=False)
    pieces = plan.pieces
    assert pieces is not None
    goes_on = Event()

    def slowly() -> Iterator[pa.RecordBatch]:
        yield first
        goes_on.wait(60)
        yield from rest

    with ThreadPoolExecutor() as threads:
        try:
            writing = threads.submit(write_piece, plan, pieces, slowly(), partition=0, attempt=0)
            wait_for(lambda: one(connection, LOADING) == 1, "the first attempt has written some rows", 20)
            twin = threads.submit(write_piece, plan, pieces, [first, *rest], partition=0, attempt=1)
            wait_for(lambda: one(connection, WAITING_FOR_LOCK) == 1 or twin.done(), "the twin waits for it", 20)
        finally:
            goes_on.set()

    assert (writing.result(), twin.result()) == (writing.result(), writing.result())
    assert counts(connection)[:2] == (100, 100)


@pytest.mark.jobs
def test_tasks_that_fail_after_they_have_committed_are_tried_again_and_count_once(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    register(spark, faulty.FailsAfterLoading)

    save(invoices(spark), options, source="outbox-fails-after-loading", **IN_FOUR)

    assert counts(connection) == COMPLETE


def test_a_single_task_is_one_transaction_in_the_order_of_the_frame(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    connection.execute(REFUSE_NEW_TABLES)
    frame = outbox_spark.in_order(invoices(spark), "customer_id", "amount", partitions=1)

    save(frame, options, **SINGLE, batchsize="30")
    save(frame, options, **SINGLE)

    assert counts(connection) == (100, 100, 1 + 2)
    assert one(connection, TRANSACTIONS) == 1
    query = "SELECT aggregate_id, (payload->>'amount')::numeric FROM outbox.message ORDER BY id"
    rows = connection.execute(query).fetchall()
    assert rows == sorted(rows)


def test_rows_that_a_trigger_holds_back_fail_their_piece(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    connection.execute("""
        CREATE FUNCTION hold_back() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER hold_back BEFORE INSERT ON billing.invoice
            FOR EACH ROW WHEN (NEW.quantity = 3) EXECUTE FUNCTION hold_back();
    """)

    with pytest.raises(SAVE_FAILS, match=r"of 100 rows 80 reached billing\.invoice"):
        save(invoices(spark, partitions=1), options, **SINGLE)

    assert counts(connection) == (0, 0, 1)


def test_a_sequence_that_only_the_whole_batch_could_check_is_refused(spark: SparkSession, options: Options) -> None:
    frame = invoices(spark)
    prepare({**options, **IN_FOUR, "sequenceColumn": "invoice_id"}, frame.schema, overwrite=False)

    with pytest.raises(outbox_spark.ColumnError, match="'amount' of option sequenceColumn has no unique index"):
        prepare({**options, **IN_FOUR, "sequenceColumn": "amount"}, frame.schema, overwrite=False)


def test_a_batch_that_an_operator_gave_up_is_refused_in_each_way(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    begin_pieces(
        connection, "outbox", app_id="nightly", version=7, number=4, token=UUID(int=1), table="billing.invoice"
    )
    connection.execute("SELECT outbox.give_up_batch('nightly', 7, 'ada', 'the input is gone')")

    for how in (IN_FOUR, {"txnAppId": "nightly", "txnVersion": "7"}):
        with pytest.raises(SAVE_FAILS) as refused:
            save(invoices(spark), options, **how)
        assert "was given up by ada at " in str(outbox_spark.reason(refused.value))
    with pytest.raises(outbox_spark.BatchError, match="the input is gone"):
        outbox_spark.committed(options["url"], "nightly", 7)

    assert counts(connection) == (0, 0, 1)
