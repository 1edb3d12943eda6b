"""Rows that no table takes: they fail the batch at the first attempt, or go into a table of bad rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

import outbox_spark
from outbox_spark import Events, OutboxBatch
from outbox_spark.commit import commit_batch
from outbox_spark.load import load, refused
from outbox_spark.prepare import clean_after, prepare
from outbox_spark.result import Result, say
from tests.spark.bad_row import make_bad_row_table
from tests.spark.frames import counts, invoices, one, save, staging_tables
from tests.spark.one_row import ROWS
from tests.spark.refused_values import FAULTS, SCHEMA, TABLE, rows_with

Options = dict[str, str]
NAME = {"txnAppId": "nightly", "txnVersion": "7"}
QUARANTINE = {"badRows": "quarantine", "badRowsTable": "billing.bad_row"}
IN_FOUR = {"atomic": "partition", "numPartitions": "4"}
BAD = "SELECT partition, position, reason, row_json FROM billing.bad_row ORDER BY partition, position"
KEYS = "SELECT array_agg(aggregate_id ORDER BY id) FROM outbox.message"
# The values of FAULTS as the table of bad rows has them.
SHOWN: list[Any] = [
    101, "{oops", "\ufffd", "cannot be read", ["a", "b\0"], {"a\0": "b"}, ["abc", "abc "], "cannot be read",
    "cannot be read", "cannot be read", [None, "no-uuid"], "[0.5, nan]", "[('a', nan)]",
]  # fmt: skip
IN_THING = {"dbtable": "billing.thing", "aggregateIdColumn": "key", "payloadColumns": "key"}


@pytest.fixture
def quarantining(options: Options, connection: psycopg.Connection) -> Options:
    """Options of a write whose bad rows go into a table."""
    make_bad_row_table(connection)
    return {**options, **QUARANTINE, **NAME}


@pytest.fixture
def named(database_url: str, connection: psycopg.Connection) -> dict[str, Any]:
    """What names an `OutboxBatch`; its database has a table of bad rows."""
    make_bad_row_table(connection)
    return {"url": database_url, "app_id": "nightly", "version": 7}


def write(options: Options, *partitions: list[pa.RecordBatch]) -> Result:
    """Write these partitions as a `save()` does, in this process."""
    plan, _ = prepare(options, SCHEMA, overwrite=False)
    staged = [load(plan, rows, partition=number, attempt=number) for number, rows in enumerate(partitions)]
    result = commit_batch([(plan, staged)])
    clean_after(plan)
    return result


def test_each_bad_row_goes_into_quarantine_and_the_others_are_written_in_their_order(
    quarantining: Options, connection: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    connection.execute(TABLE)
    batches = [rows_with(column, value, count=3, place=place % 3) for place, (column, value, _) in enumerate(FAULTS)]
    whole = pa.concat_batches([rows_with("share", 0, count=3), *batches])

    result = write({**quarantining, **IN_THING, "batchsize": "8"}, [whole], [rows_with("key", "D", count=1)])
    say(result)

    bad = connection.execute(BAD).fetchall()
    assert [(position, reason) for _, position, reason, _ in bad] == [
        (3 + 3 * number + number % 3, fault) for number, (_, _, fault) in enumerate(FAULTS)
    ]
    good = [f"C{place}" for place in range(3)]
    for number in range(len(FAULTS)):
        good += [f"C{place}" for place in range(3) if place != number % 3]
    assert one(connection, KEYS) == [*good, "D"]
    assert one(connection, "SELECT count(*) FROM billing.thing") == len(good) + 1
    assert one(connection, "SELECT row_counts->'bad_rows' FROM outbox.batch") == len(FAULTS)
    written = f"{len(good) + 1} rows, {len(good) + 1} events, {len(FAULTS)} bad rows"
    assert [record.getMessage() for record in caplog.records] == [
        f"outbox: batch 'nightly' version 7 written: {written}"
    ]
    assert one(connection, "SELECT count(DISTINCT message_id) FROM outbox.message") == len(good) + 1
    rows = [json.loads(row) for *_, row in bad]
    assert [row["key"] for row in rows] == [f"C{number % 3}" for number in range(len(FAULTS))]
    assert [row[column] for row, (column, _, _) in zip(rows, FAULTS, strict=True)] == SHOWN
    assert staging_tables(connection) == []


def test_a_partition_of_bad_rows_alone_writes_no_row(quarantining: Options, connection: psycopg.Connection) -> None:
    connection.execute(TABLE)

    result = write({**quarantining, **IN_THING}, [rows_with("share", 101)], [rows_with("body", b"\xff")])

    assert (result.rows, result.events, result.bad_rows) == (0, 0, 2)
    assert [(partition, position) for partition, position, *_ in connection.execute(BAD)] == [(0, 0), (1, 0)]
    assert staging_tables(connection) == []


@pytest.mark.parametrize("column", ["share", "body"], ids=["by-the-server", "by-the-task"])
def test_more_bad_rows_than_may_be_fail_the_batch(
    quarantining: Options, connection: psycopg.Connection, column: str
) -> None:
    connection.execute(TABLE)
    bad = rows_with(column, 101 if column == "share" else b"\xff")
    given = {**quarantining, **IN_THING, "maxBadRows": "2"}

    with pytest.raises(outbox_spark.RowError, match="partition 0 has more than 2 bad rows, the most that maxBadRows"):
        write(given, [pa.concat_batches([bad, bad, bad])])
    with pytest.raises(outbox_spark.RowError, match=r"it has 3 bad rows for billing\.thing, and maxBadRows allows 2\."):
        write(given, [bad, bad], [bad])

    assert (counts(connection), one(connection, "SELECT count(*) FROM billing.bad_row")) == ((0, 0, 0), 0)


def test_save_quarantines_bad_rows_once(
    spark: SparkSession, quarantining: Options, connection: psycopg.Connection
) -> None:
    faulty = f.when(f.col("quantity") == 3, None).otherwise(f.col("customer_id"))
    frame = invoices(spark).withColumn("customer_id", faulty)

    for _ in range(2):
        save(frame, quarantining)

    assert counts(connection) == (80, 80, 1)
    bad = connection.execute("SELECT DISTINCT app_id, version, table_name, reason FROM billing.bad_row").fetchall()
    assert bad == [("nightly", 7, "billing.invoice", "column 'customer_id' is NULL")]
    assert one(connection, "SELECT count(*) FROM billing.bad_row") == 20
    row = one(connection, "SELECT row_json FROM billing.bad_row WHERE (partition, position) = (0, 2)")
    assert json.loads(row) == {
        "invoice_id": "INV-2", "customer_id": None, "issued_on": "2026-01-03", "quantity": 3, "amount": 2.11,
    }  # fmt: skip
    assert str(outbox_spark.last_result(quarantining["url"], "nightly", 7)) == (
        "batch 'nightly' version 7 recognised: 80 rows, 80 events, 20 bad rows"
    )


@pytest.mark.parametrize("how", [{}, {"upsertKeys": "invoice_id", "onlyChanged": "true"}, IN_FOUR])
def test_a_bad_value_is_tried_once(
    spark: SparkSession, options: Options, connection: psycopg.Connection, tmp_path: Path, how: Options
) -> None:
    frame = _noting_attempts(invoices(spark), tmp_path)

    with pytest.raises((PySparkException, outbox_spark.RowError)) as refused:
        save(frame, options, **NAME, **how)

    assert str(outbox_spark.reason(refused.value)).endswith("column 'invoice_id' holds a NUL character")
    assert sorted(path.name for path in tmp_path.glob("2-*")) == ["2-0"]  # of three attempts that Spark allows
    assert counts(connection)[:2] == ((0, 0) if how is not IN_FOUR else (75, 75))
    assert staging_tables(connection) == []


def test_tasks_that_begin_behind_a_bad_value_load_nothing(options: Options, connection: psycopg.Connection) -> None:
    connection.execute(TABLE)
    plan, _ = prepare({**options, **IN_THING}, SCHEMA, overwrite=False)

    with pytest.raises(outbox_spark.RowError) as found:
        load(plan, [rows_with("share", 101)], partition=0, attempt=0)
    staged = refused([plan], found.value, partition=0)
    staged.append(load(plan, [rows_with("share", 0)], partition=1, attempt=1))

    assert [each.is_left_out for each in staged] == [False, True]
    assert staging_tables(connection) == []
    with pytest.raises(outbox_spark.RowError, match="violates check constraint"):
        commit_batch([(plan, staged)])


def test_a_bad_value_of_a_batch_of_several_tables_is_tried_once(
    spark: SparkSession, options: Options, connection: psycopg.Connection, tmp_path: Path
) -> None:
    frame = _noting_attempts(invoices(spark), tmp_path)

    with (
        pytest.raises(outbox_spark.RowError, match="column 'invoice_id' holds a NUL character"),
        OutboxBatch(spark, url=options["url"], app_id="nightly", version=7) as batch,
    ):
        batch.rows(frame, table="billing.invoice")

    assert sorted(path.name for path in tmp_path.glob("2-*")) == ["2-0"]
    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []


def test_an_event_that_a_function_does_not_make_is_tried_again(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    def make(row: dict[str, Any]) -> dict[str, Any]:
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("a service is busy")
        return {"payload": {"invoice_id": row["invoice_id"]}}

    with OutboxBatch(spark, url=options["url"], app_id="nightly", version=7) as batch:
        events = Events(function=make, aggregate_type="customer", event_type="InvoiceIssued")
        batch.rows(invoices(spark, 4), table="billing.invoice", events=events)

    assert counts(connection) == (4, 4, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"badRowsTable": ""}, "options badRows=quarantine and badRowsTable belong together: give both or neither"),
        ({"badRows": "fail"}, "options badRows=quarantine and badRowsTable belong together: give both or neither"),
        ({"badRows": "drop"}, "option badRows takes 'fail' or 'quarantine', not 'drop'"),
        ({"singleTask": "true"}, "option badRows=quarantine takes atomic=batch without singleTask"),
        ({"badRowsTable": "billing.none"}, "billing.none of option badRowsTable does not exist in database"),
        ({"badRowsTable": "billing.none"}, ": CREATE TABLE billing.none (app_id text NOT NULL, version bigint NOT NUL"),
        (
            {"badRowsTable": "billing.invoice"},
            "billing.invoice of option badRowsTable has no column app_id text: CR",
        ),
    ],
)
def test_what_cannot_be_quarantined_is_refused_before_any_task(
    quarantining: Options, changed: Options, message: str
) -> None:
    with pytest.raises(outbox_spark.OutboxWriteError) as refused:
        prepare({**quarantining, **changed}, from_arrow_schema(ROWS), overwrite=False)

    assert message in str(refused.value)


IN_PYTHON: dict[str, Any] = {"table": "billing.invoice", "bad_rows": "quarantine", "bad_rows_table": "billing.bad_row"}
WITHOUT_ROW = """
    SELECT count(*) FROM outbox.message AS event
    WHERE NOT EXISTS (SELECT FROM billing.invoice WHERE invoice_id = event.payload->>'invoice_id')
"""


@pytest.mark.parametrize("door", ["rows(events=)", "events()"])
def test_a_batch_of_several_tables_makes_no_event_of_a_bad_row(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection, door: str
) -> None:
    frame = _with_bad_rows(spark, connection)

    with OutboxBatch(spark, **named) as batch:
        if door == "events()":
            batch.rows(frame, **IN_PYTHON)
            batch.events(frame, **_made())
        else:
            batch.rows(frame, **IN_PYTHON, events=Events(**_made()))

    assert counts(connection) == (60, 60, 1)
    assert one(connection, WITHOUT_ROW) == 0
    bad = "SELECT reason, count(*) FROM billing.bad_row GROUP BY 1 ORDER BY 1"
    assert connection.execute(bad).fetchall() == [
        ("column 'customer_id' is NULL", 20),
        ("column 'tags': invalid input syntax for type json (Token \"oops\" is invalid.)", 20),
    ]
    row = one(connection, "SELECT row_json FROM billing.bad_row WHERE (partition, position) = (0, 2)")
    assert json.loads(row) == {
        "invoice_id": "INV-2", "customer_id": None, "issued_on": "2026-01-03", "quantity": 3, "amount": 2.11,
        "tags": "[]",
    }  # fmt: skip
    assert str(batch.result) == "batch 'nightly' version 7 written: 60 rows, 60 events, 40 bad rows"
    assert staging_tables(connection) == []


def test_each_dataframe_of_a_batch_has_a_most_of_bad_rows_and_the_result_their_sum(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    connection.execute("CREATE TABLE billing.copied (LIKE billing.invoice)")
    frame = _with_bad_rows(spark, connection)

    def write(most: int) -> OutboxBatch:
        with OutboxBatch(spark, **named) as batch:
            batch.events(invoices(spark, 5), **_made())
            batch.rows(frame, **IN_PYTHON, max_bad_rows=40)
            copied = frame.drop("tags").where("quantity < 4").select("*")
            batch.rows(copied, **{**IN_PYTHON, "table": "billing.copied"}, max_bad_rows=most)
        return batch

    with pytest.raises(outbox_spark.RowError, match=r"20 bad rows for billing\.copied, and maxBadRows allows 19"):
        write(19)
    assert (counts(connection), one(connection, "SELECT count(*) FROM billing.bad_row")) == ((0, 0, 0), 0)
    result = write(20).result

    assert result is not None
    assert (result.rows, result.events, result.bad_rows) == (60 + 40, 5, 40 + 20)
    by_table = "SELECT table_name, count(*) FROM billing.bad_row GROUP BY 1 ORDER BY 1"
    assert connection.execute(by_table).fetchall() == [("billing.copied", 20), ("billing.invoice", 40)]
    assert one(connection, "SELECT row_counts->'bad_rows' FROM outbox.batch") == 60


def test_bad_rows_stay_out_of_an_upsert_that_passes_over_rows(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    frame = _with_bad_rows(spark, connection)
    with OutboxBatch(spark, **named) as batch:
        batch.rows(invoices(spark, 50), table="billing.invoice")

    with OutboxBatch(spark, **{**named, "version": 8}) as batch:
        upsert: dict[str, Any] = {"upsert_keys": ["invoice_id"], "if_absent": True}
        batch.rows(frame, **IN_PYTHON, **upsert, events=Events(**_made()))

    assert str(batch.result) == "batch 'nightly' version 8 written: 30 rows, 30 events, 30 unchanged, 40 bad rows"


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda batch, frame: batch.rows(frame, table="billing.invoice", bad_rows="quarantine"),
            "bad_rows=quarantine and bad_rows_table belong together: give both or neither",
        ),
        (
            lambda batch, frame: batch.rows(frame, **{**IN_PYTHON, "bad_rows_table": "billing.none"}),
            "table billing.none of bad_rows_table of rows() does not exist in database",
        ),
        (
            lambda batch, frame: batch.rows(frame, **IN_PYTHON, max_bad_rows=0),
            "max_bad_rows takes a whole number from 1 to 10000, not 0",
        ),
        (
            lambda batch, frame: batch.rows(frame, **IN_PYTHON, events=Events(function=dict)),
            "with bad_rows='quarantine' one call of rows() tells which rows of a DataFrame are good",
        ),
        (
            lambda batch, frame: [batch.rows(frame, **IN_PYTHON), batch.events(frame, function=dict)],
            "with bad_rows='quarantine' one call of rows()",
        ),
        (
            lambda batch, frame: [batch.events(frame, **_made()), batch.rows(frame, **IN_PYTHON)],
            "with bad_rows='quarantine' one call of rows()",
        ),
        (
            lambda batch, frame: [batch.rows(frame, **IN_PYTHON), *(batch.events(frame, **_made()) for _ in range(2))],
            "with bad_rows='quarantine' one call of rows()",
        ),
        (
            lambda batch, frame: [batch.rows(frame, **IN_PYTHON), batch.rows(frame, table="billing.invoice")],
            "with bad_rows='quarantine' one call of rows()",
        ),
    ],
)
def test_what_cannot_be_quarantined_is_refused_when_it_is_named(
    spark: SparkSession, named: dict[str, Any], add: Any, message: str
) -> None:
    with pytest.raises(outbox_spark.OptionError if "does not exist" not in message else outbox_spark.TableError) as no:
        _add(OutboxBatch(spark, **named), invoices(spark), add)

    assert message in str(no.value)


def _made() -> dict[str, Any]:
    """Return what the event of an invoice is made of."""
    columns = {"aggregate_id": f.col("customer_id"), "payload": f.struct("invoice_id")}
    return {"aggregate_type": "customer", "event_type": "InvoiceIssued", **columns}


def _add(batch: OutboxBatch, frame: DataFrame, add: Any) -> None:
    with batch:
        add(batch, frame)


def _with_bad_rows(spark: SparkSession, connection: psycopg.Connection) -> DataFrame:
    """Return 100 invoices of which a task finds 20 that are bad, and PostgreSQL 20 others."""
    connection.execute("ALTER TABLE billing.invoice ADD tags json")
    return invoices(spark).withColumns(
        {
            "customer_id": f.when(f.col("quantity") == 3, None).otherwise(f.col("customer_id")),
            "tags": f.when(f.col("quantity") == 4, "{oops").otherwise("[]"),
        }
    )


def _noting_attempts(frame: DataFrame, folder: Path) -> DataFrame:
    """Return the DataFrame with a bad value in partition 2; each attempt at a partition leaves a file."""

    def note(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        (folder / f"{context.partitionId()}-{context.attemptNumber()}").touch()
        yield from batches

    good = f.col("invoice_id")
    faulty = f.when(good == "INV-60", f.concat(good, f.lit("\0"))).otherwise(good)
    return frame.withColumn("invoice_id", faulty).mapInArrow(note, frame.schema)
