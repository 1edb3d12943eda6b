"""Rows of the table that are there already: updated, left as they are or deleted, and which of them make events."""

from concurrent.futures import ThreadPoolExecutor
from datetime import date
from decimal import Decimal

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

import outbox_spark
from outbox_spark import Events, OutboxBatch
from outbox_spark.commit import commit_batch
from outbox_spark.load import load
from outbox_spark.prepare import clean_after, prepare
from outbox_spark.result import Result
from relay.testing.servers.process import wait_for
from tests.spark import faulty
from tests.spark.frames import WAITING_FOR_LOCK, counts, invoices, one, register, save, staging_tables
from tests.spark.one_row import ROWS, Row, row
from tests.support.roles import granted_roles

Options = dict[str, str]
UPSERT = {"upsertKeys": "invoice_id"}
CHANGED = {**UPSERT, "onlyChanged": "true"}
ABSENT = {**UPSERT, "ifAbsent": "true"}
DELETES = {**UPSERT, "deleteColumn": "gone", "deleteEventType": "InvoiceCancelled"}
NAME = {"txnAppId": "nightly", "txnVersion": "7"}
EVENTS = "SELECT array_agg(payload->>'invoice_id' ORDER BY id) FROM outbox.message"
EVENTS_OF = "SELECT array_agg(concat(event_type, ' ', payload) ORDER BY id) FROM outbox.message"
COUNTS = "SELECT row_counts - '{seconds,table}'::text[] FROM outbox.batch WHERE app_id = 'nightly'"
INVOICES = "SELECT array_agg(invoice_id ORDER BY invoice_id) FROM billing.invoice"
AMOUNTS = "SELECT jsonb_object_agg(invoice_id, amount) FROM billing.invoice"
WITH_FLAG = ROWS.append(pa.field("gone", pa.bool_()))


def write(options: Options, *partitions: list[Row], schema: pa.Schema = ROWS) -> Result:
    """Write these partitions as a `save()` does, in this process."""
    plan, _ = prepare(options, from_arrow_schema(schema), overwrite=False)
    staged = [
        load(plan, [pa.RecordBatch.from_pylist(rows, schema)], partition=number, attempt=number)
        for number, rows in enumerate(partitions)
    ]
    result = commit_batch([(plan, staged)])
    clean_after(plan)
    return result


@pytest.fixture
def written(options: Options, connection: psycopg.Connection) -> Options:
    """Five invoices are in the table, and no events."""
    write(options, [row(number) for number in range(5)])
    connection.execute("DELETE FROM outbox.message; DELETE FROM outbox.batch")
    return options


def test_an_upsert_updates_rows_and_each_makes_an_event(written: Options, connection: psycopg.Connection) -> None:
    result = write({**written, **UPSERT}, [row(0), row(1, amount=Decimal(9))], [row(5)])

    assert one(connection, EVENTS) == ["INV-0", "INV-1", "INV-5"]
    assert one(connection, AMOUNTS) == {"INV-0": 0, "INV-1": 9, "INV-2": 2, "INV-3": 3, "INV-4": 4, "INV-5": 5}
    assert (result.rows, result.events, result.unchanged) == (3, 3, 0)


@pytest.mark.every_postgres
def test_only_a_changed_row_is_written_and_makes_an_event(written: Options, connection: psycopg.Connection) -> None:
    before: dict[str, str] = dict(connection.execute("SELECT invoice_id, xmin::text FROM billing.invoice").fetchall())

    result = write(
        {**written, **CHANGED, **NAME}, [row(4), row(0), row(5)], [row(3, amount=Decimal(9)), row(1), row(2)]
    )

    now: dict[str, str] = dict(connection.execute("SELECT invoice_id, xmin::text FROM billing.invoice").fetchall())
    assert {name for name, version in now.items() if before.get(name) != version} == {"INV-3", "INV-5"}
    assert one(connection, EVENTS) == ["INV-5", "INV-3"]
    assert one(connection, COUNTS) == {"rows": 2, "messages": 2, "deleted": 0, "unchanged": 4}
    assert (result.rows, result.events, result.unchanged) == (2, 2, 4)
    assert staging_tables(connection) == []


def test_a_row_that_is_there_stays_and_makes_no_event(written: Options, connection: psycopg.Connection) -> None:
    result = write({**written, **ABSENT}, [row(0, amount=Decimal(9)), row(6)], [row(1), row(5)])

    assert one(connection, EVENTS) == ["INV-6", "INV-5"]
    assert one(connection, "SELECT amount FROM billing.invoice WHERE invoice_id = 'INV-0'") == 0
    assert (result.rows, result.events, result.unchanged) == (2, 2, 2)


def test_a_deleted_row_makes_an_event_of_its_keys_and_a_missing_one_makes_no_event(
    written: Options, connection: psycopg.Connection
) -> None:
    gone = {"gone": True, "amount": None, "quantity": None, "issued_on": None}  # as a change feed tells of a delete
    rows = [row(0, **gone), row(1, amount=Decimal(9)), row(8, **gone)], [row(2), row(3, **gone)]

    result = write({**written, **DELETES, **NAME, "payloadColumns": "amount"}, *rows, schema=WITH_FLAG)

    assert one(connection, INVOICES) == ["INV-1", "INV-2", "INV-4"]
    assert one(connection, EVENTS_OF) == [
        'InvoiceCancelled {"invoice_id":"INV-0"}',
        'InvoiceIssued {"amount":9.00}',
        'InvoiceIssued {"amount":2.00}',
        'InvoiceCancelled {"invoice_id":"INV-3"}',
    ]
    assert one(connection, COUNTS) == {"rows": 2, "messages": 4, "deleted": 2, "unchanged": 1}
    assert (result.rows, result.deleted, result.events, result.unchanged) == (2, 2, 4, 1)


def test_a_row_takes_what_a_deleted_one_had(written: Options, connection: psycopg.Connection) -> None:
    connection.execute("ALTER TABLE billing.invoice ADD UNIQUE (issued_on)")

    write({**written, **DELETES}, [row(9, issued_on=date(2026, 1, 1))], [row(0, gone=True)], schema=WITH_FLAG)

    assert one(connection, EVENTS) == ["INV-9", "INV-0"]
    assert counts(connection)[0] == 5


def test_a_row_that_does_not_say_whether_it_is_deleted_is_refused(
    written: Options, connection: psycopg.Connection
) -> None:
    with pytest.raises(outbox_spark.RowError, match=r"'C1' .*: it does not say whether it is deleted"):
        write({**written, **DELETES}, [row(0), row(1, gone=None)], schema=WITH_FLAG)


def test_ids_of_deletes_with_one_sequence_are_refused(written: Options, connection: psycopg.Connection) -> None:
    connection.execute("ALTER TABLE billing.invoice ADD UNIQUE (issued_on)")
    rows = [row(number, gone=True, customer_id="C", issued_on=date(2026, 1, 1)) for number in range(2)]

    with pytest.raises(outbox_spark.BatchError, match="2 events of key 'C' have the same message id"):
        write({**written, **DELETES, "sequenceColumn": "issued_on"}, rows, schema=WITH_FLAG)


@pytest.mark.parametrize(
    ("how", "meanwhile", "events"),
    [
        (CHANGED, "UPDATE billing.invoice SET amount = 9 WHERE invoice_id = 'INV-0'", None),
        (CHANGED, "UPDATE billing.invoice SET amount = 8 WHERE invoice_id = 'INV-0'", ["INV-0"]),
        (CHANGED, "DELETE FROM billing.invoice WHERE invoice_id = 'INV-0'", ["INV-0"]),
        (ABSENT, "INSERT INTO billing.invoice VALUES ('INV-9', 'C', '2026-01-01', 1, 1)", None),
        (DELETES, "DELETE FROM billing.invoice WHERE invoice_id = 'INV-3'", None),
        (DELETES, "UPDATE billing.invoice SET amount = 8 WHERE invoice_id = 'INV-3'", ["INV-3"]),
    ],
    ids=["made-equal", "made-different", "deleted", "inserted", "deleted-by-both", "updated"],
)
def test_what_another_transaction_changes_meanwhile_decides_what_is_an_event(
    written: Options, connection: psycopg.Connection, how: Options, meanwhile: str, events: list[str] | None
) -> None:
    rows = {"onlyChanged": row(0, amount=Decimal(9)), "ifAbsent": row(9), "deleteColumn": row(3, gone=True)}
    (rows_of_this,) = [made for option, made in rows.items() if option in how]
    schema = WITH_FLAG if how is DELETES else ROWS

    with ThreadPoolExecutor() as threads:
        with connection.transaction():
            connection.execute(meanwhile)
            writing = threads.submit(write, {**written, **how}, [rows_of_this], schema=schema)
            with psycopg.connect(written["url"], autocommit=True) as watching:
                wait_for(lambda: one(watching, WAITING_FOR_LOCK) == 1 or writing.done(), "it waits for the row", 20)
            assert not writing.done()
        writing.result()

    assert one(connection, EVENTS) == events


NO_CASE = """
    CREATE COLLATION billing.no_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)
"""
KINDS = """
    CREATE TYPE billing.mood AS ENUM ('glad', 'sad');
    CREATE TABLE billing.thing (
        key text PRIMARY KEY, body json, facts jsonb, host inet, mood billing.mood, place point,
        name text{collation}, bodies json[], price numeric, at timestamptz, ratio float8
    );
"""
KIND_FIELDS = {
    "key": pa.string(), "body": pa.string(), "facts": pa.string(), "host": pa.string(), "mood": pa.string(),
    "place": pa.string(), "name": pa.string(), "bodies": pa.list_(pa.string()), "price": pa.decimal128(10, 2),
    "at": pa.timestamp("us", "UTC"), "ratio": pa.float64(),
}  # fmt: skip


@pytest.mark.every_postgres
def test_every_type_is_compared_and_a_null_differs_from_a_value(
    options: Options, connection: psycopg.Connection
) -> None:
    try:
        connection.execute(NO_CASE)
        collation = " COLLATE billing.no_case"
    except psycopg.errors.FeatureNotSupported:  # a server without ICU has no collation that takes two texts for one
        collation = ""
    connection.execute(KINDS.format(collation=collation))
    given = {
        **options, "dbtable": "billing.thing", "aggregateIdColumn": "key", "upsertKeys": "key", "onlyChanged": "true",
        "payloadColumns": "key",
    }  # fmt: skip
    schema = pa.schema(KIND_FIELDS)
    good: Row = {
        "key": "a", "body": '{"a": 1}', "facts": '{"a": 1}', "host": "10.0.0.1", "mood": "sad", "place": "(1,2)",
        "name": "Ann", "bodies": ["{}", None], "price": Decimal("1.50"), "at": None, "ratio": 0.1,
    }  # fmt: skip
    write(given, [good], schema=schema)

    assert write(given, [good], schema=schema).rows == 0
    others: Row = {
        "body": '{"a":1}', "facts": '{"a": 2}', "host": "10.0.0.2", "mood": "glad", "place": "(1,3)", "name": "ANN",
        "bodies": ["{}"], "price": None, "at": 0, "ratio": float("nan"),
    }  # fmt: skip
    changed = {}
    for name, value in others.items():
        good[name] = value
        changed[name] = write(given, [good], [], schema=schema).rows

    assert changed == dict.fromkeys(others, 1)


def test_a_staging_table_emptied_before_the_commit_is_noticed_where_rows_may_stay(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    register(spark, faulty.LosesStaging)

    with pytest.raises((PySparkException, outbox_spark.BatchError)) as refused:
        save(invoices(spark), options, source="outbox-loses-staging", **CHANGED)

    assert "partition 2 staged 25 rows and 0 reached billing.invoice" in str(outbox_spark.reason(refused.value))
    assert counts(connection) == (0, 0, 0)


def test_a_row_that_a_trigger_holds_back_fails_where_no_row_may_stay(
    written: Options, connection: psycopg.Connection
) -> None:
    connection.execute("""
        CREATE FUNCTION hold_back() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER hold_back BEFORE UPDATE ON billing.invoice FOR EACH ROW EXECUTE FUNCTION hold_back();
    """)

    with pytest.raises(outbox_spark.BatchError, match="staged 1 rows and 0 reached"):
        write({**written, **DELETES}, [row(0)], schema=WITH_FLAG)
    assert write({**written, **CHANGED}, [row(0, amount=Decimal(9))]).unchanged == 1

    assert one(connection, EVENTS) is None


def test_save_writes_changed_rows_once_and_tells_the_result(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    save(invoices(spark), options)
    dearer = invoices(spark, 105).withColumn("amount", f.expr("if(quantity = 3, amount + 1, amount)"))
    frame = dearer.withColumn("amount", f.col("amount").cast("decimal(12, 2)"))

    results = []
    for _ in range(2):
        save(frame, options, **CHANGED, **NAME)
        results.append(outbox_spark.last_result(options["url"], "nightly", 7))

    changed = "quantity = 3 OR invoice_id >= 'INV-100' AND length(invoice_id) = 7"
    expected = one(connection, f"SELECT count(*) FROM billing.invoice WHERE {changed}")
    assert counts(connection) == (105, 100 + expected, 2)
    assert [str(result) for result in results] == [
        f"batch 'nightly' version 7 {outcome}: {expected} rows, {expected} events, {105 - expected} unchanged"
        for outcome in ("written", "recognised")
    ]
    assert outbox_spark.last_result(options["url"], "nightly", 8) is None
    assert staging_tables(connection) == []


def test_a_batch_of_several_tables_makes_events_of_changed_rows(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    save(invoices(spark), options)
    frame = invoices(spark, 104).withColumn("gone", f.col("amount") < 3)
    event_type = f.when(f.col("gone"), "InvoiceCancelled").otherwise("InvoiceIssued")
    events = Events(
        aggregate_type="customer", aggregate_id=f.col("customer_id"), event_type=event_type, payload=f.struct("amount")
    )

    for _ in range(2):
        with OutboxBatch(spark, url=options["url"], app_id="nightly", version=7) as batch:
            batch.rows(
                frame,
                table="billing.invoice",
                upsert_keys=["invoice_id"],
                only_changed=True,
                delete_column="gone",
                events=events,
            )
            batch.events(invoices(spark, 1), aggregate_type="day", event_type="DayEnded", payload=f.struct("issued_on"))

    assert counts(connection) == (101, 100 + 3 + 4 + 1, 2)
    assert one(connection, "SELECT count(*) FROM outbox.message WHERE event_type = 'InvoiceCancelled'") == 3
    assert one(connection, "SELECT count(*) FROM outbox.message WHERE event_type = 'DayEnded'") == 1
    assert batch.result is not None
    assert str(batch.result) == "batch 'nightly' version 7 recognised: 4 rows, 8 events, 3 deleted, 97 unchanged"
    assert staging_tables(connection) == []


def test_events_whose_rows_cannot_be_told_are_refused(spark: SparkSession, options: Options) -> None:
    frame = invoices(spark)
    changed: Row = {"table": "billing.invoice", "upsert_keys": ["invoice_id"], "only_changed": True}
    same: Row = {"aggregate_type": "a", "event_type": "b"}
    whole = {**same, "payload": f.struct("amount")}

    def add(batch: OutboxBatch, number: int) -> None:
        if number == 0:
            batch.rows(frame, **changed, events=Events(function=dict, **same))
        elif number == 1:
            batch.rows(frame, **changed)
            batch.events(frame, **whole)
        else:
            batch.events(frame, **whole)
            batch.rows(frame, **changed)

    for number in range(3):
        with (
            pytest.raises(outbox_spark.OptionError, match=r"some rows make no event. So say rows\("),
            OutboxBatch(spark, url=options["url"], app_id="nightly", version=7) as batch,
        ):
            add(batch, number)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"onlyChanged": "true"}, "option onlyChanged takes upsertKeys, the columns that find a row"),
        (
            {**ABSENT, "onlyChanged": "true"},
            "ifAbsent leaves every row that is there as it is, and excludes option",
        ),
        (
            {"upsertKeys": "amount"},
            "upsertKeys amount: no unique index of billing.invoice is on just these columns",
        ),
        ({"upsertKeys": "id"}, "column 'id' of upsertKeys is not in the DataFrame"),
        ({**UPSERT, "singleTask": "true"}, "option upsertKeys takes atomic=batch without singleTask: other tasks copy"),
        ({**UPSERT, "deleteColumn": "gone"}, "options deleteColumn and deleteEventType belong together"),
        ({**DELETES, "deleteColumn": "quantity"}, "column 'quantity' of deleteColumn is no boolean column of the Data"),
        ({**DELETES, "deleteColumn": "quantity"}, "column 'quantity' of deleteColumn is in billing.invoice, too"),
        ({"onRecognised": "warn"}, "option onRecognised takes 'skip' or 'fail', not 'warn'"),
    ],
)
def test_what_cannot_be_upserted_is_refused_before_any_task(options: Options, changed: Options, message: str) -> None:
    with pytest.raises(outbox_spark.OutboxWriteError) as refused:
        prepare({**options, **changed}, from_arrow_schema(ROWS), overwrite=False)

    assert message in str(refused.value)


def test_an_upsert_without_its_rights_is_told_what_to_grant(written: Options, connection: psycopg.Connection) -> None:
    ways = ((ABSENT, ROWS, "SELECT"), (CHANGED, ROWS, "SELECT, UPDATE"), (DELETES, WITH_FLAG, "SELECT, UPDATE, DELETE"))
    with granted_roles(connection, "spark_job"):
        connection.execute("""
            CREATE ROLE spark_job LOGIN PASSWORD 'weak' IN ROLE outbox_spark;
            GRANT USAGE ON SCHEMA billing TO spark_job;
            GRANT INSERT ON billing.invoice TO spark_job;
        """)
        login = {**written, "user": "spark_job", "password": "weak", "stagingSchema": "outbox_staging"}
        for number, (how, schema, rights) in enumerate(ways):
            with pytest.raises(outbox_spark.ColumnError) as refused:
                prepare({**login, **how}, from_arrow_schema(schema), overwrite=False)
            grant = f'GRANT {rights} ON "billing"."invoice" TO "spark_job"'
            assert str(refused.value) == f"upsertKeys takes more rights to billing.invoice than INSERT: {grant}"
            connection.execute(grant)
            assert write({**login, **how}, [row(10 + number)], schema=schema).rows == 1

        connection.execute("REVOKE UPDATE (row_counts) ON outbox.batch FROM outbox_spark")
        with pytest.raises(outbox_spark.TableError, match="how many rows are written cannot be noted"):
            prepare({**login, **CHANGED}, from_arrow_schema(ROWS), overwrite=False)
