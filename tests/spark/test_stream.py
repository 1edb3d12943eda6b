"""Streams: a micro-batch is a batch of the ledger, and a restart from the checkpoint writes it once."""

import os
import shutil
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import outbox_spark
from outbox_spark.ledger import enter, take_for_query
from outbox_spark.prepare import prepare_stream
from tests.spark.bad_row import make_bad_row_table
from tests.spark.frames import counts, invoices, one, save, staging_tables
from tests.spark.releases import with_sources

Options = dict[str, str]
STREAM = "invoices-stream"
VERSIONS = "SELECT array_agg(version ORDER BY version) FROM outbox.batch"
REPEATED = "SELECT array_agg(version) FROM outbox.batch WHERE row_counts->'repeats' = '1'"


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Path:
    """A folder to stream from; `_arrive` puts files in."""
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@with_sources
def test_each_micro_batch_is_written_once_through_restarts(
    spark: SparkSession, options: Options, connection: psycopg.Connection, source: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    for number in range(2):
        _arrive(spark, source, number)
        _stream(spark, source, checkpoint, options)
    # As after a crash between our commit and Spark's own note of it.
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink()

    _stream(spark, source, checkpoint, options)
    _arrive(spark, source, 2)
    _stream(spark, source, checkpoint, options)

    assert counts(connection)[:2] == (60, 60)
    assert one(connection, VERSIONS) == [0, 1, 2]
    assert one(connection, REPEATED) == [1]
    assert one(connection, "SELECT count(DISTINCT message_id) FROM outbox.message") == 60
    assert one(connection, "SELECT array_agg(DISTINCT batch_id ORDER BY batch_id) FROM outbox.message") == [0, 1, 2]
    assert staging_tables(connection) == []


@with_sources
def test_a_micro_batch_whose_commit_failed_is_written_by_the_restart(
    spark: SparkSession, options: Options, connection: psycopg.Connection, source: Path, tmp_path: Path
) -> None:
    _arrive(spark, source, 0)
    connection.execute("ALTER TABLE billing.invoice ADD CONSTRAINT none CHECK (quantity > 1000) NOT VALID")
    with pytest.raises(PySparkException) as refused:
        _stream(spark, source, tmp_path / "checkpoint", options)
    assert "nothing of the batch was written: new row" in str(outbox_spark.reason(refused.value))
    assert counts(connection) == (0, 0, 0)
    connection.execute("ALTER TABLE billing.invoice DROP CONSTRAINT none")

    _stream(spark, source, tmp_path / "checkpoint", options)

    assert counts(connection) == (20, 20, 1)
    assert staging_tables(connection) == []


@with_sources
def test_a_stream_upserts_and_a_repeated_micro_batch_makes_no_event_again(
    spark: SparkSession, options: Options, connection: psycopg.Connection, source: Path, tmp_path: Path
) -> None:
    changed = {**options, "upsertKeys": "invoice_id", "onlyChanged": "true"}
    save(invoices(spark, 15), options)
    _arrive(spark, source, 0)
    _stream(spark, source, tmp_path / "checkpoint", changed)
    (tmp_path / "checkpoint" / "commits" / "0").unlink()
    (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink()
    connection.execute("UPDATE billing.invoice SET amount = 99")  # which a repeat would undo

    _stream(spark, source, tmp_path / "checkpoint", changed)

    assert counts(connection) == (20, 15 + 5, 2)
    assert one(connection, "SELECT sum(amount) FROM billing.invoice") == 20 * 99
    assert str(outbox_spark.last_result(options["url"], STREAM, 0)) == (
        "batch 'invoices-stream' version 0 recognised: 5 rows, 5 events, 15 unchanged"
    )


@with_sources
def test_a_stream_quarantines_bad_rows_once(
    spark: SparkSession, options: Options, connection: psycopg.Connection, source: Path, tmp_path: Path
) -> None:
    make_bad_row_table(connection)
    connection.execute("ALTER TABLE billing.invoice ALTER invoice_id TYPE varchar(5)")  # as long as INV-9
    given = {**options, "badRows": "quarantine", "badRowsTable": "billing.bad_row"}
    _arrive(spark, source, 0)

    for _ in range(2):
        _stream(spark, source, tmp_path / "checkpoint", given)
        for name in ("0", ".0.crc"):
            (tmp_path / "checkpoint" / "commits" / name).unlink()

    assert counts(connection) == (10, 10, 1)
    assert one(connection, "SELECT count(*) FROM billing.bad_row WHERE app_id = 'invoices-stream'") == 10


@with_sources
@pytest.mark.jobs
def test_a_new_checkpoint_under_an_old_name_is_refused(
    spark: SparkSession, options: Options, connection: psycopg.Connection, source: Path, tmp_path: Path
) -> None:
    _arrive(spark, source, 0)
    _stream(spark, source, tmp_path / "checkpoint", options)

    with pytest.raises(PySparkException) as refused:
        _stream(spark, source, tmp_path / "another", options)

    assert "A stream without its checkpoint is a new one" in str(outbox_spark.reason(refused.value))
    assert counts(connection) == (20, 20, 1)


@with_sources
@pytest.mark.jobs
def test_an_older_checkpoint_is_refused(
    spark: SparkSession, options: Options, connection: psycopg.Connection, source: Path, tmp_path: Path
) -> None:
    _arrive(spark, source, 0)
    _stream(spark, source, tmp_path / "checkpoint", options)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "backup")
    for number in (1, 2):
        _arrive(spark, source, number)
        _stream(spark, source, tmp_path / "checkpoint", options)

    with pytest.raises(PySparkException) as refused:
        _stream(spark, source, tmp_path / "backup", options)

    words = str(outbox_spark.reason(refused.value))
    assert words.startswith("micro-batch 1 of 'invoices-stream' comes after micro-batch 2 was written")
    assert counts(connection) == (60, 60, 3)


@pytest.mark.timeout(300)
def test_foreach_batch_writes_as_everywhere_and_refuses_another_checkpoint(
    spark: SparkSession, options: Options, connection: psycopg.Connection, source: Path, tmp_path: Path
) -> None:
    def write(frame: DataFrame, batch: outbox_spark.MicroBatch) -> None:
        for _ in range(2):
            save(frame.coalesce(1), options, **batch.options, singleTask="true")

    def stream(checkpoint: str) -> None:
        reading = spark.readStream.schema(invoices(spark).schema).parquet(str(source))
        named = outbox_spark.foreach_batch(write, url=options["url"], app_id=STREAM)
        writing = reading.writeStream.foreachBatch(named).option("checkpointLocation", str(tmp_path / checkpoint))
        writing.trigger(availableNow=True).start().awaitTermination()

    for number in range(2):
        _arrive(spark, source, number)
        stream("checkpoint")
    assert counts(connection)[:2] == (40, 40)
    _arrive(spark, source, 2)

    with pytest.raises(PySparkException) as refused:
        stream("another")

    assert "A stream without its checkpoint is a new one" in str(outbox_spark.reason(refused.value))
    assert counts(connection)[:2] == (40, 40)


def test_a_name_belongs_to_one_query(connection: psycopg.Connection) -> None:
    for _ in range(2):
        take_for_query(connection, "outbox", app_id=STREAM, number=7, query="a query")
    enter(connection, "outbox", app_id="old", version=7, partitions=1, token=uuid4(), row_counts={})

    for app_id, query in ((STREAM, "another"), ("old", "a query")):
        with pytest.raises(outbox_spark.BatchError, match=f"'{app_id}' belongs to another query than this one"):
            take_for_query(connection, "outbox", app_id=app_id, number=7, query=query)


def test_foreach_batch_refuses_an_older_checkpoint(connection: psycopg.Connection) -> None:
    for version in (7, 8):
        take_for_query(connection, "outbox", app_id=STREAM, number=version, query="a query")
        name = f"{STREAM}/a query"
        enter(connection, "outbox", app_id=name, version=version, partitions=1, token=uuid4(), row_counts={})
    take_for_query(connection, "outbox", app_id=STREAM, number=8, query="a query")

    with pytest.raises(outbox_spark.BatchError, match="Its checkpoint is older than the ledger"):
        take_for_query(connection, "outbox", app_id=STREAM, number=7, query="a query")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"txnAppId": ""}, "option txnAppId is missing: it names the stream"),
        ({"txnVersion": "7"}, "option txnVersion is the micro-batch's own number"),
        ({"singleTask": "true"}, "a stream takes only atomic=batch"),
    ],
)
def test_options_that_no_stream_can_have_are_refused(
    spark: SparkSession, options: Options, changed: Options, message: str
) -> None:
    with pytest.raises(outbox_spark.OptionError) as refused:
        prepare_stream({**options, "txnAppId": STREAM, **changed}, invoices(spark).schema, overwrite=False)

    assert message in str(refused.value)


def _arrive(spark: SparkSession, folder: Path, number: int) -> None:
    """Put twenty more invoices into the folder, all of them at once."""
    frame = invoices(spark, 20 * (number + 1), partitions=1).where(f"amount >= {20 * number}")
    staged = folder.parent / f"written-{number}"
    frame.write.parquet(str(staged))
    (part,) = staged.glob("*.parquet")
    os.rename(part, folder / f"{number}.parquet")


def _stream(spark: SparkSession, folder: Path, checkpoint: Path, options: Options) -> None:
    """Write what has arrived, and stop."""
    reading = spark.readStream.schema(invoices(spark).schema).parquet(str(folder)).repartition(2)
    writing = reading.writeStream.format("outbox").options(**options, txnAppId=STREAM)
    query = writing.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
