"""`OutboxBatch`: several tables and their events in one transaction."""

from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import outbox_spark
from outbox_spark import OutboxBatch, WriteLimits
from tests.spark.frames import counts, invoices, one, staging_tables

Options = dict[str, str]
LINES = "CREATE TABLE billing.invoice_line (invoice_id text, line integer, tags json, PRIMARY KEY (invoice_id, line))"
TRANSACTIONS = """
    SELECT count(DISTINCT xmin::text) FROM (
        SELECT xmin FROM billing.invoice UNION SELECT xmin FROM billing.invoice_line
        UNION SELECT xmin FROM outbox.message_pending
    ) AS every_row
"""


@pytest.fixture
def named(database_url: str, connection: psycopg.Connection) -> dict[str, Any]:
    """What names a batch; its database has two tables."""
    connection.execute(LINES)
    return {"url": database_url, "app_id": "nightly", "version": 7}


def test_tables_and_events_are_one_transaction_and_one_batch(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    for _ in range(2):
        with OutboxBatch(spark, **named) as batch:
            batch.rows(invoices(spark), table="billing.invoice")
            batch.rows(_lines(spark), table="billing.invoice_line")
            batch.events(_events(invoices(spark)))
            batch.events(_events(invoices(spark)).withColumn("event_type", f.lit("InvoiceSent")))

    assert counts(connection) == (100, 200, 1)
    assert one(connection, "SELECT count(*) FROM billing.invoice_line WHERE tags->>1 = 'b'") == 100
    assert one(connection, TRANSACTIONS) == 1
    assert one(connection, "SELECT row_counts->'repeats' FROM outbox.batch") == 1
    assert one(connection, "SELECT count(DISTINCT message_id) FROM outbox.message") == 200
    assert staging_tables(connection) == []
    assert batch.recognised is not None
    assert batch.recognised.row_counts.pop("seconds") in range(300)
    assert batch.recognised.row_counts == {
        "rows": 200,
        "table": "billing.invoice, billing.invoice_line",
        "messages": 200,
    }


def test_upsert_updates_the_rows_that_are_there(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    with OutboxBatch(spark, **named) as batch:
        batch.rows(invoices(spark, 60), table="billing.invoice")

    with OutboxBatch(spark, **{**named, "version": 8}) as batch:
        dearer = invoices(spark).withColumn("amount", f.expr("CAST(amount + 1 AS decimal(12, 2))"))
        for frame in (invoices(spark, 120), dearer):  # the later call updates the rows of the earlier one
            batch.rows(frame, table="billing.invoice", upsert_keys=["invoice_id"])

    assert counts(connection) == (120, 0, 2)
    updated = "SELECT sum(amount) FROM billing.invoice WHERE ltrim(invoice_id, 'INV-')::int < 100"
    assert one(connection, updated) == sum(range(1, 101)) + 11


def test_upsert_takes_each_key_once_and_no_null(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    in_two_partitions = invoices(spark, 2, partitions=2).withColumn("invoice_id", f.lit("INV-1"))
    upsert: dict[str, Any] = {"table": "billing.invoice", "upsert_keys": ["invoice_id"]}

    with (
        pytest.raises(outbox_spark.BatchError) as twice,
        OutboxBatch(spark, **named) as batch,
    ):
        batch.rows(in_two_partitions, **upsert)
    connection.execute("ALTER TABLE billing.invoice DROP CONSTRAINT invoice_pkey, ADD UNIQUE (invoice_id)")
    connection.execute("ALTER TABLE billing.invoice ALTER invoice_id DROP NOT NULL")
    with pytest.raises(outbox_spark.RowError) as null, OutboxBatch(spark, **named) as batch:
        batch.rows(in_two_partitions.withColumn("invoice_id", f.lit(None).cast("string")), **upsert)

    assert str(twice.value) == (
        "nothing of the batch was written: 2 rows for billing.invoice have the same upsertKeys, invoice_id (INV-1). "
        "Leave one of them in the DataFrame"
    )
    assert str(null.value).endswith("written to billing.invoice: column 'invoice_id' is NULL")
    assert counts(connection) == (0, 0, 0)


def test_a_decimal_key_is_the_same_text_whatever_makes_the_event(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    frame = spark.sql("SELECT CAST('0.00000012' AS decimal(10, 8)) AS key")
    same: dict[str, Any] = {"aggregate_type": "customer", "event_type": "InvoiceIssued"}

    with OutboxBatch(spark, **named) as batch:
        batch.events(frame, aggregate_id=f.col("key"), payload=f.expr("map(key, 1)"), **same)
        batch.events(frame, function=lambda row: {"aggregate_id": row["key"], "payload": {}}, **same)

    assert one(connection, "SELECT DISTINCT aggregate_id FROM outbox.message") == "0.00000012"
    assert one(connection, "SELECT payload->>'0.00000012' FROM outbox.message ORDER BY id LIMIT 1") == "1"


def test_an_event_is_made_of_columns_and_texts(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    with OutboxBatch(spark, **named) as batch:
        batch.events(
            invoices(spark, 1),
            aggregate_type="customer",
            aggregate_id=f.col("customer_id"),
            event_type=f.concat(f.lit("Invoice"), f.lit("Issued")),
            routing_key="bills",
            exchange="",
            content_type="text/json",
            headers=f.expr("map('source', invoice_id)"),
            payload=f.struct("amount", "issued_on", f.array(f.struct("quantity")).alias("lines")),
        )

    assert _message(connection) == {
        "aggregate_type": "customer",
        "aggregate_id": "C0",
        "event_type": "InvoiceIssued",
        "exchange": "",
        "routing_key": "bills",
        "content_type": "text/json",
        "headers": {"source": "INV-0"},
        "payload": '{"amount":0.11,"issued_on":"2026-01-01","lines":[{"quantity":1}]}',
        "writer": "nightly",
        "batch_id": 7,
    }


def test_an_event_is_made_of_a_struct(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    frame = invoices(spark, 1).select(
        f.struct(f.lit("InvoiceIssued").alias("event_type"), f.lit("{}").alias("payload")).alias("event")
    )

    with OutboxBatch(spark, **named) as batch:
        batch.events(frame, struct="event", aggregate_type="customer")

    message = _message(connection)
    assert (message["event_type"], message["aggregate_id"], message["payload"]) == ("InvoiceIssued", None, "{}")


def test_events_are_made_by_a_function(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    def make(row: dict[str, Any]) -> list[dict[str, Any]] | dict[str, Any] | None:
        event = {"aggregate_id": row["customer_id"], "payload": {"amount": row["amount"]}}
        if row["quantity"] == 1:
            return None
        if row["quantity"] == 2:
            return event
        return [event, {**event, "headers": {"copy": "1"}}]

    with OutboxBatch(spark, **named) as batch:
        batch.events(invoices(spark, 15), function=make, aggregate_type="customer", event_type="InvoiceIssued")

    assert one(connection, "SELECT count(*) FROM outbox.message") == 3 * (0 + 1 + 3 * 2)
    assert one(connection, 'SELECT count(*) FROM outbox.message WHERE headers = \'{"copy": "1"}\'') == 9
    assert one(connection, "SELECT payload::text FROM outbox.message ORDER BY id LIMIT 1") == '{"amount": "1.11"}'


def test_a_message_key_makes_the_same_ids_in_another_batch(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    for app_id in ("nightly", "by hand"):
        with OutboxBatch(spark, **{**named, "app_id": app_id}) as batch:
            batch.events(_events(invoices(spark)).withColumn("message_key", f.col("aggregate_id")).limit(1))

    ((first,), (second,)) = connection.execute("SELECT message_id FROM outbox.message").fetchall()
    expected = outbox_spark.message_id(
        "", 0, aggregate_type="customer", aggregate_id="C0", event_type="InvoiceIssued", sequence="C0"
    )
    assert first == second == expected


def test_message_ids_may_be_given_and_never_twice(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    given = "00000000-0000-0000-0000-00000000002a"
    frame = _events(invoices(spark)).withColumn("message_id", f.lit(given))
    with OutboxBatch(spark, **named) as batch:
        batch.events(frame.limit(1))
    assert str(one(connection, "SELECT message_id FROM outbox.message")) == given

    with (
        pytest.raises(outbox_spark.BatchError, match="100 events of key 'C0' have the same message id"),
        OutboxBatch(spark, **{**named, "version": 8}) as batch,
    ):
        batch.events(frame)

    assert staging_tables(connection) == []


@pytest.mark.parametrize("field", ["message_key", "message_id"])
def test_one_id_in_two_frames_is_refused(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection, field: str
) -> None:
    frame = _events(invoices(spark, 1))
    given = frame.withColumn(field, f.lit("00000000-0000-0000-0000-00000000002a"))
    with ExitStack() as block:
        batch = block.enter_context(OutboxBatch(spark, **named))
        batch.rows(invoices(spark, 1), table="billing.invoice")
        batch.events(given)
        batch.events(frame)  # its id is by place
        batch.events(given)
        with pytest.raises(outbox_spark.BatchError) as refused:
            block.close()

    assert "2 events of key 'C0' have the same message id" in str(refused.value)
    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []


@pytest.mark.parametrize("num_partitions", [None, 3])
def test_events_may_be_ordered_over_all_partitions(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection, num_partitions: int | None
) -> None:
    with OutboxBatch(spark, **named, limits=WriteLimits(num_partitions=num_partitions)) as batch:
        shuffled = invoices(spark, 1000).orderBy(f.rand(1))
        fields = {"aggregate_type": "customer", "event_type": "InvoiceIssued", "payload": f.struct("amount")}
        batch.events(shuffled, order_by=[f.desc("amount")], **fields)

    amounts = [amount for (amount,) in connection.execute("SELECT payload->>'amount' FROM outbox.message ORDER BY id")]
    assert amounts == [f"{number}.11" for number in reversed(range(1000))]


def test_a_block_that_raises_writes_nothing(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    def fail(batch: OutboxBatch) -> None:
        batch.rows(invoices(spark), table="billing.invoice")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), OutboxBatch(spark, **named) as batch:
        fail(batch)

    assert counts(connection) == (0, 0, 0)


def test_a_frame_that_fails_leaves_nothing_of_the_others(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    batch = OutboxBatch(spark, **named)
    with ExitStack() as block:
        block.enter_context(batch)
        batch.rows(invoices(spark), table="billing.invoice")
        batch.events(_events(invoices(spark)).withColumn("event_type", f.lit("")))
        with pytest.raises(outbox_spark.RowError) as refused:
            block.close()

    words = str(refused.value)
    assert "the row with aggregate_id 'C" in words
    assert "cannot be written to the outbox: its event_type is missing" in words
    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda batch, frame: batch.rows(frame, table="billing.none"), "table billing.none of rows() does not exist"),
        (
            lambda batch, frame: batch.rows(frame, table="billing.invoice", only_changed=True),
            "only_changed takes upsert_keys, the columns that find a row",
        ),
        (
            lambda batch, frame: batch.rows(frame, table="billing.invoice", upsert_keys=["amount"]),
            "upsertKeys amount: no unique index of billing.invoice is on just these columns: CREATE UNIQUE INDEX ON",
        ),
        (lambda batch, frame: batch.events(frame), "column 'invoice_id' is no column of an event: message_id"),
        (lambda batch, frame: batch.events(frame, payload=f.struct("*")), "aggregate_type is missing: give it, or a"),
        (lambda batch, frame: batch.events(frame, type="x"), "an event has message_id, aggregate_type"),
        (
            lambda batch, frame: batch.events(frame, function=dict, payload=f.lit("{}")),
            "function, struct and Columns exclude each other",
        ),
        (
            lambda batch, frame: batch.events(frame, aggregate_type="x", event_type="x", payload=f.expr("X'00'")),
            "a payload of bytes takes content_type: give it, or a column of that name",
        ),
        (
            lambda batch, frame: batch.events(frame, aggregate_type="x", event_type="x", payload=f.col("amount")),
            "column 'payload' takes a string of JSON, bytes, or a struct, map or array, not decimal(12,2)",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_named(
    spark: SparkSession, named: dict[str, Any], add: Any, message: str
) -> None:
    with pytest.raises(outbox_spark.OutboxWriteError) as refused, OutboxBatch(spark, **named) as batch:
        add(batch, invoices(spark))

    assert message in str(refused.value)


def test_what_would_write_nothing_is_refused(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    batch = OutboxBatch(spark, **named)
    with pytest.raises(outbox_spark.BatchError, match="add to a batch that is open: call them inside of `with"):
        batch.rows(invoices(spark), table="billing.invoice")
    with pytest.raises(outbox_spark.BatchError, match="the block has added no DataFrame"), batch:
        pass
    with pytest.raises(outbox_spark.BatchError, match="add to a batch that is open"):
        batch.events(_events(invoices(spark)))

    assert counts(connection) == (0, 0, 0)


def test_a_batch_that_is_opened_again_has_no_dataframe_of_the_block_that_failed(
    spark: SparkSession, named: dict[str, Any], connection: psycopg.Connection
) -> None:
    connection.execute("ALTER TABLE billing.invoice DROP CONSTRAINT invoice_pkey")  # which would refuse repeats itself
    batch = OutboxBatch(spark, **named)

    def write() -> None:
        with batch:
            batch.rows(invoices(spark), table="billing.invoice")
            batch.events(_events(invoices(spark)))

    connection.execute("ALTER TABLE billing.invoice ADD CONSTRAINT none CHECK (quantity > 1000) NOT VALID")
    with pytest.raises(outbox_spark.BatchError, match="nothing of the batch was written"):
        write()
    connection.execute("ALTER TABLE billing.invoice DROP CONSTRAINT none")
    write()

    assert counts(connection) == (100, 100, 1)
    with pytest.raises(outbox_spark.BatchError, match="is open already"), batch, batch:
        pass


def test_every_fault_of_the_batch_is_told_at_once(spark: SparkSession) -> None:
    with pytest.raises(outbox_spark.OptionError) as refused:
        OutboxBatch(spark, url="postgresql://", app_id="", version=-1, limits=WriteLimits(batchsize=0))

    assert [word in str(refused.value) for word in ("app_id", "version", "batchsize")] == [True, True, True]


def _lines(spark: SparkSession) -> DataFrame:
    return invoices(spark).select("invoice_id", f.lit(1).alias("line"), f.array(f.lit("a"), f.lit("b")).alias("tags"))


def _events(frame: DataFrame) -> DataFrame:
    return frame.select(
        f.lit("customer").alias("aggregate_type"),
        f.col("customer_id").alias("aggregate_id"),
        f.lit("InvoiceIssued").alias("event_type"),
        f.to_json(f.struct("*")).alias("payload"),
    )


def _message(connection: psycopg.Connection) -> dict[str, Any]:
    """Return the only message."""
    fields = "aggregate_type, aggregate_id, event_type, exchange, routing_key, content_type, headers"
    with connection.cursor(row_factory=dict_row) as cursor:
        query = f"SELECT {fields}, payload::text, writer, batch_id FROM outbox.message"
        (message,) = cursor.execute(query).fetchall()
    return message
