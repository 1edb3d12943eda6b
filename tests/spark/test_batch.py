"""A batch as it should be: both tables in one transaction, exact values, order per key."""

import ast
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import dict_row
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import outbox_spark
from outbox_spark.spark_api import TIME_TYPES
from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate
from tests.spark.frames import counts, invoices, one, save, staging_tables
from tests.spark.releases import with_sources

ROOT = Path(__file__).resolve().parents[2]

EVERY_TYPE = """
    CREATE TABLE billing.thing (
        id uuid PRIMARY KEY, small smallint, whole integer, big bigint, money numeric(30, 10), any_number numeric,
        from_whole numeric(12, 2), real_number real, double_number double precision, yes boolean, day date,
        instant timestamptz, wall_clock timestamp, at time, words text, short varchar(5), bytes bytea, document json,
        binary_document jsonb, "odd ""name" text DEFAULT 'by the table'
    )
"""
EVERY_VALUE = r"""
    SELECT '00000000-0000-0000-0000-00000000002a' AS id, CAST(-3 AS smallint) AS small, 4 AS whole,
        9007199254740993 AS big, CAST('12345678901234567890.0123456789' AS decimal(30, 10)) AS money,
        CAST('0.1' AS decimal(3, 1)) AS any_number, 7 AS from_whole, CAST(1.5 AS float) AS real_number,
        CAST(0.1 AS double) AS double_number, true AS yes, date'2026-02-28' AS day,
        timestamp'2026-03-01 05:30:00.123456+05:30' AS instant,
        timestamp_ntz'2026-03-01 05:30:00.5' AS wall_clock, {time} AS at,
        'tab\t "quote" back\\slash ß 漢 😀 \u0001' AS words, 'äöüßé' AS short, X'00ff' AS bytes,
        '{"kept":  "as it is"}' AS document, '{"b": 1}' AS binary_document
"""


TIME = "time'12:03:04'" if TIME_TYPES else "'12:03:04.000000'"


@pytest.mark.every_postgres
def test_rows_events_and_ledger_are_written_together(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    save(invoices(spark), options, txnAppId="nightly", txnVersion="7", batchsize="10")

    assert counts(connection) == (100, 100, 1)
    assert staging_tables(connection) == []
    writers = "SELECT count(DISTINCT xmin::text) FROM (SELECT xmin FROM {} UNION SELECT xmin FROM {}) AS every_row"
    assert one(connection, writers.format("billing.invoice", "outbox.message_pending")) == 1
    batch = outbox_spark.committed(options["url"], "nightly", 7)
    assert batch is not None
    assert batch.row_counts.pop("seconds") in range(300)
    assert (batch.partitions, batch.row_counts) == (4, {"rows": 100, "table": "billing.invoice", "messages": 100})
    with connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("SELECT * FROM outbox.message WHERE payload->>'invoice_id' = 'INV-40'").fetchall()[0]
    expected = {"aggregate_type": "customer", "aggregate_id": "C5", "event_type": "InvoiceIssued", "state": "pending"}
    assert {name: row[name] for name in expected} == expected
    assert (row["writer"], row["batch_id"], row["exchange"], row["headers"]) == ("nightly", 7, None, None)


def test_every_type_arrives_exactly(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    connection.execute(EVERY_TYPE)
    frame = spark.sql(EVERY_VALUE.replace("{time}", TIME))
    nulls = frame.select(
        f.expr("uuid()").alias("id"), *(f.expr(f"if(true, null, {n})").alias(n) for n in frame.drop("at").columns[1:])
    )

    save(frame, options, dbtable="billing.thing", aggregateIdColumn="id", sequenceColumn="id")
    save(nulls, options, dbtable="billing.thing", aggregateIdColumn="words")

    text = one(connection, "SELECT to_json(thing)::text FROM billing.thing WHERE whole = 4")
    row = json.loads(text, parse_float=str)
    assert row == {
        "id": "00000000-0000-0000-0000-00000000002a",
        "small": -3,
        "whole": 4,
        "big": 9007199254740993,
        "money": "12345678901234567890.0123456789",
        "any_number": "0.1",
        "from_whole": "7.00",
        "real_number": "1.5",
        "double_number": "0.1",
        "yes": True,
        "day": "2026-02-28",
        "instant": "2026-03-01T00:00:00.123456+00:00",
        "wall_clock": "2026-03-01T05:30:00.5",
        "at": "12:03:04",
        "words": 'tab\t "quote" back\\slash ß 漢 😀 \x01',
        "short": "äöüßé",
        "bytes": "\\x00ff",
        "document": {"kept": "as it is"},
        "binary_document": {"b": 1},
        'odd "name': "by the table",
    }
    payload = json.loads(
        one(connection, "SELECT payload::text FROM outbox.message WHERE aggregate_id LIKE '000%'"), parse_float=str
    )
    assert payload == {
        **{name: value for name, value in row.items() if name != 'odd "name'},
        "from_whole": 7,
        "instant": "2026-03-01T00:00:00.123456Z",
        "wall_clock": "2026-03-01T05:30:00.500000",
        "at": "12:03:04.000000",
        "bytes": "AP8=",
        "document": '{"kept":  "as it is"}',
        "binary_document": '{"b": 1}',
    }
    without = one(connection, "SELECT payload FROM outbox.message WHERE aggregate_id IS NULL")
    assert [name for name, value in without.items() if value is not None] == ["id"]


def test_the_options_of_an_event_reach_its_row(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    frame = invoices(spark, 1).withColumns({"hdr": f.expr("map('source', 'a \"b\"')"), "body": f.lit('{"x": 1.10}')})

    save(
        frame, options, headersColumn="hdr", payloadColumn="body", exchange="", routingKey="q", contentType="text/json"
    )

    fields = "exchange, routing_key, content_type, headers, payload::text"
    (row,) = connection.execute(f"SELECT {fields} FROM outbox.message").fetchall()
    assert row == ("", "q", "text/json", {"source": 'a "b"'}, '{"x": 1.10}')


def test_the_events_of_a_key_keep_their_order(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    connection.execute("CREATE TABLE billing.step (customer_id text, number integer)")
    steps = spark.range(0, 60_000, 1, 4).selectExpr("concat('C', id % 50) AS customer_id", "CAST(id AS int) AS number")
    frame = outbox_spark.in_order(steps.orderBy(f.rand(1)), "customer_id", "number", partitions=3)

    save(frame, options, dbtable="billing.step", batchsize="7000")

    query = "SELECT aggregate_id, (payload->>'number')::int FROM outbox.message ORDER BY id"
    last: dict[str, int] = {}
    for key, number in connection.execute(query):
        assert number > last.get(key, -1)
        last[key] = number
    assert len(last) == 50


def test_a_sequence_makes_the_same_ids_whatever_the_partitions(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    name = {"txnAppId": "nightly", "txnVersion": "7", "sequenceColumn": "invoice_id"}
    save(invoices(spark), options, **name)
    first = one(connection, "SELECT json_object_agg(payload->>'invoice_id', message_id) FROM outbox.message")
    connection.execute("TRUNCATE billing.invoice, outbox.message_pending, outbox.batch")

    save(invoices(spark).orderBy(f.rand(1)).repartition(2), options, **name)

    assert one(connection, "SELECT json_object_agg(payload->>'invoice_id', message_id) FROM outbox.message") == first
    assert first["INV-40"] == str(
        outbox_spark.message_id(
            "nightly", 7, aggregate_type="customer", aggregate_id="C5", event_type="InvoiceIssued", sequence="INV-40"
        )
    )


def test_without_a_sequence_ids_are_unique_and_tell_of_the_batch(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    save(invoices(spark, 50), options)
    save(invoices(spark, 100).where("CAST(substr(invoice_id, 5) AS int) >= 50"), options)

    assert one(connection, "SELECT count(DISTINCT message_id) FROM outbox.message") == 100
    assert one(connection, "SELECT count(DISTINCT left(message_id::text, 8)) FROM outbox.message") == 2
    assert one(connection, "SELECT DISTINCT substr(message_id::text, 15, 1) FROM outbox.message") == "8"


def test_the_outbox_may_have_another_name(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection, database_url: str
) -> None:
    migrate(DatabaseSettings.model_validate({"url": database_url, "schema": "events"}))
    connection.execute('CREATE SCHEMA "stage it"')

    save(invoices(spark), options, outboxSchema="events", stagingSchema="stage it")

    assert counts(connection) == (100, 0, 0)
    assert one(connection, "SELECT count(*) FROM events.message") == 100
    assert staging_tables(connection) == []


def test_an_empty_frame_is_a_batch_too(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    save(invoices(spark, 0), options)

    assert counts(connection) == (0, 0, 1)


@with_sources
def test_a_thread_that_registers_the_format_writes(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    def write() -> None:
        outbox_spark.register(spark)
        save(invoices(spark, 5, partitions=1), options)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(write).result()

    assert counts(connection) == (5, 5, 1)


def test_the_writer_uses_nothing_that_spark_connect_lacks() -> None:
    ask_first = {"workers.py", "spark_api.py"}  # whether there is a context
    package = ROOT / "spark" / "outbox_spark"
    files = [file for file in package.rglob("*.py") if file.name not in ask_first and file.parent.name != "jobs"]
    trees = [ast.walk(ast.parse(file.read_text())) for file in files]
    nodes = [node for tree in trees for node in tree]

    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}

    assert used.isdisjoint({"rdd", "sparkContext", "_sc", "_jvm", "_jdf", "_jsparkSession"})
    assert not [
        name for name in imported if name.startswith(("py4j", "pyspark.rdd", "pyspark.core", "pyspark.sql.classic"))
    ]
    assert "pyspark.sql" in imported


def test_type_checkers_read_the_annotations() -> None:
    assert Path(outbox_spark.__file__).with_name("py.typed").exists()


def test_executors_need_no_psycopg() -> None:
    program = """if True:
        import sys
        sys.modules["psycopg"] = None
        import outbox_spark, outbox_spark.load, outbox_spark.pieces, outbox_spark.reading.stream
    """

    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=ROOT / "spark"
    )

    assert done.stderr == ""
