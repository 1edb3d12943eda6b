"""What is refused before any task runs, by name; and rows that are refused with their key."""

import re
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import LongType, StructField, StructType

import outbox_spark
from outbox_spark.errors import OutboxWriteError
from outbox_spark.options import OPTIONS, Option, Use, options_of
from outbox_spark.prepare import prepare
from outbox_spark.reading.plan import plan_read, plan_tasks
from outbox_spark.reading.reader import read_task
from tests.spark.frames import counts, invoices, one, save, staging_tables
from tests.spark.releases import SAVE_FAILS, with_sources
from tests.spark.sent import add_sent

Options = dict[str, str]
ONE_COLUMN = StructType([StructField("id", LongType())])
DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batchSze": "5"}, "option 'batchsze' is unknown; did you mean batchsize?"),
        ({"path": "/tmp/x"}, "option 'path' is unknown; known are url, dbtable"),
        ({"eventType": ""}, "option eventType is missing"),
        ({"batchsize": "-1"}, "option batchsize takes a whole number from 1 to 10000000, not '-1'"),
        ({"txnAppId": "a"}, "options txnAppId and txnVersion name a batch together: give both or neither"),
        ({"txnAppId": "a", "txnVersion": "x"}, "option txnVersion takes a whole number"),
        ({"atomic": "row"}, "option atomic takes 'batch' or 'partition', not 'row'"),
        ({"atomic": "partition"}, "option atomic=partition takes numPartitions, the number of the DataFrame's part"),
        ({"atomic": "partition", "numPartitions": "4"}, "option atomic=partition takes txnAppId and txnVersion: when"),
        ({"singleTask": "yes"}, "option singleTask takes true or false, not 'yes'"),
        ({"singleTask": "true", "numPartitions": "2"}, "a DataFrame of one partition; numPartitions says 2"),
        ({"url": "jdbc:postgresql://x/y"}, "option url takes a libpq URL"),
        ({"payloadColumns": "amount", "payloadColumn": "amount"}, "exclude each other"),
        ({"routingKey": "k" * 256}, "option routingKey is longer than 255 bytes"),
        ({"dbtable": "billing.nothing"}, "table billing.nothing of option dbtable does not exist in database"),
        ({"dbtable": "pg_catalog.pg_views"}, "pg_catalog.pg_views of option dbtable is no table"),
        ({"outboxSchema": "empty"}, 'table "empty"."message" of option outboxSchema does not exist in database'),
        ({"stagingSchema": "nowhere"}, "staging tables cannot be made in schema 'nowhere'"),
        ({"aggregateIdColumn": "customer"}, "column 'customer' of option aggregateIdColumn is not in the DataFrame"),
        ({"payloadColumns": "amount, prize"}, "column 'prize' of option payloadColumns is not in the DataFrame"),
        (
            {"payloadColumn": "amount"},
            "column 'amount' of option payloadColumn takes a string of JSON, bytes, or a struct, map",
        ),
        ({"headersColumn": "amount"}, "column 'amount' of option headersColumn takes a map of strings, or a string"),
    ],
)
def test_options_that_cannot_be_are_refused(
    spark: SparkSession, options: Options, changed: Options, message: str
) -> None:
    given = {**options, **changed}

    with pytest.raises(OutboxWriteError) as refused:
        prepare(given, invoices(spark).schema, overwrite=False)

    assert message in str(refused.value).replace("'\"", '"').replace("\"'", '"')
    assert "\n" not in str(refused.value)


def test_every_fault_of_the_options_is_told_at_once(spark: SparkSession, options: Options) -> None:
    with pytest.raises(outbox_spark.OptionError) as refused:
        prepare({**options, "dbtable": "", "atomic": "no", "colour": "red"}, invoices(spark).schema, overwrite=False)

    assert [word in str(refused.value) for word in ("dbtable", "atomic", "colour")] == [True, True, True]


@pytest.mark.parametrize(
    ("heading", "options"),
    [
        ("## Options", options_of(Use.WRITE, Use.WRITE_STREAM)),
        (
            "## Reading",
            {
                name: option
                for name, option in options_of(Use.READ, Use.READ_STREAM).items()
                if Use.WRITE not in option.uses
            },
        ),
    ],
    ids=["write", "read"],
)
def test_the_documented_options_are_those_that_are_known(heading: str, options: dict[str, Option]) -> None:
    section = DOCUMENTATION.read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    listed = [item.replace("\n  ", " ") for item in re.findall(r"^- (`\w+`: .*(?:\n  .*)*)", section, re.MULTILINE)]

    defaults = {name: f" ({option.shown_default})" if option.shown_default else "" for name, option in options.items()}
    assert listed == [f"`{name}`: {option.takes}{defaults[name]}" for name, option in options.items()]


def test_an_option_is_taken_once_by_each_use() -> None:
    for use in Use:
        taken = [option.parameter for option in OPTIONS if use in option.uses]
        assert sorted(set(taken)) == sorted(taken)


def test_a_wrong_password_is_never_shown(spark: SparkSession, options: Options) -> None:
    with pytest.raises(OutboxWriteError) as refused:
        prepare({**options, "password": "opensesame"}, invoices(spark).schema, overwrite=False)

    assert "password authentication failed" in str(refused.value)
    assert "opensesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop("amount"), "column 'amount' of billing.invoice is NOT NULL without a default"),
        (
            lambda frame: frame.withColumn("tax", f.lit(1)),
            "column 'tax' is not in billing.invoice, and no option names",
        ),
        (
            lambda frame: frame.withColumn("amount", f.col("amount").cast("decimal(14,4)")),
            "column 'amount' is decimal(14,4) in the DataFrame and numeric(12,2) in billing.invoice",
        ),
        (
            lambda frame: frame.withColumn("quantity", f.col("quantity").cast("bigint")),
            "column 'quantity' is bigint in the DataFrame and integer in billing.invoice",
        ),
        (
            lambda frame: frame.withColumn("issued_on", f.col("issued_on").cast("timestamp")),
            "column 'issued_on' is timestamp in the DataFrame and date in billing.invoice",
        ),
        (
            lambda frame: frame.withColumn("amount", f.expr("interval 1 day")),
            "column 'amount' is interval day, which has no JSON: cast it, or leave it out with the option payloadC",
        ),
        (
            lambda frame: frame.select("*", f.lit(1).alias("quantity")),
            "column 'quantity' is in the DataFrame more than once",
        ),
    ],
    ids=["missing", "unknown", "rounded", "too-wide", "cut", "no-json", "twice"],
)
def test_columns_that_do_not_fit_are_refused(
    spark: SparkSession, options: Options, change: Callable[[DataFrame], DataFrame], message: str
) -> None:
    with pytest.raises(outbox_spark.ColumnError) as refused:
        prepare(options, change(invoices(spark)).schema, overwrite=False)

    assert message in str(refused.value)


@pytest.mark.parametrize(("spark_type", "table_type"), [("timestamp", "timestamp"), ("timestamp_ntz", "timestamptz")])
def test_a_timestamp_never_gains_or_loses_its_zone(
    spark: SparkSession, options: Options, connection: psycopg.Connection, spark_type: str, table_type: str
) -> None:
    connection.execute(f"ALTER TABLE billing.invoice ADD paid_at {table_type}")
    frame = invoices(spark).withColumn("paid_at", f.lit(None).cast(spark_type))

    with pytest.raises(outbox_spark.ColumnError, match="column 'paid_at' is timestamp"):
        prepare(options, frame.schema, overwrite=False)


def test_generated_columns_are_refused(spark: SparkSession, options: Options, connection: psycopg.Connection) -> None:
    connection.execute("ALTER TABLE billing.invoice ADD total numeric GENERATED ALWAYS AS (amount * quantity) STORED")

    with pytest.raises(outbox_spark.ColumnError, match=r"column 'total' .* is generated"):
        prepare(options, invoices(spark).withColumn("total", f.lit(1)).schema, overwrite=False)


def test_an_event_with_an_id_that_the_database_makes_is_refused(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    connection.execute("ALTER TABLE billing.invoice ADD id bigint GENERATED BY DEFAULT AS IDENTITY")

    save(invoices(spark), options)
    with pytest.raises(outbox_spark.ColumnError) as refused:
        prepare({**options, "payloadColumns": "id, amount"}, invoices(spark).schema, overwrite=False)

    assert str(refused.value) == (
        "column 'id' of option payloadColumns is not in the DataFrame. billing.invoice makes it when the event is made "
        "already, so no event can have it. Make ids in Spark, for example with uuid()"
    )
    assert one(connection, "SELECT count(DISTINCT id) FROM billing.invoice") == 100


def test_who_may_not_write_or_read_is_told_what_to_grant(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    def refused(deed: Callable[[], object]) -> str:
        with pytest.raises((outbox_spark.TableError, outbox_spark.ReadError)) as told:
            deed()
        return str(told.value)

    def write() -> object:
        return prepare({**options, **login}, invoices(spark).schema, overwrite=False)

    def read() -> object:
        wanted = plan_read({"url": options["url"], **login}, ONE_COLUMN)
        return [row for task in plan_tasks(wanted) for row in read_task(wanted, task)]

    login = {"user": "spark_writer", "password": "weak"}
    connection.execute("DROP ROLE IF EXISTS spark_writer; CREATE ROLE spark_writer LOGIN PASSWORD 'weak'")
    try:
        assert refused(write).endswith('permission denied for schema outbox: GRANT "outbox_spark" TO "spark_writer"')
        assert refused(read) == "permission denied for schema outbox: give the role of url what outbox_archive has"
        connection.execute("GRANT USAGE ON SCHEMA outbox TO spark_writer")
        assert refused(write).endswith('of option outboxSchema: GRANT "outbox_spark" TO "spark_writer"')
        add_sent(connection, "2026-11-01", 1)
        assert refused(read).endswith("SQLSTATE: 42501: give the role of url what outbox_archive has")
        connection.execute("GRANT SELECT, INSERT ON outbox.message, outbox.batch TO spark_writer")
        assert refused(write).endswith(
            'GRANT USAGE, CREATE ON SCHEMA "outbox" TO "spark_writer", or name another with the option stagingSchema'
        )
        connection.execute("GRANT CREATE ON SCHEMA outbox TO spark_writer")
        assert refused(write).endswith('GRANT USAGE ON SCHEMA "billing" TO "spark_writer"')
        connection.execute("GRANT USAGE ON SCHEMA billing TO spark_writer")
        assert refused(write).endswith('GRANT INSERT ON "billing"."invoice" TO "spark_writer"')
    finally:
        connection.execute("DROP OWNED BY spark_writer; DROP ROLE spark_writer")


@with_sources
@pytest.mark.parametrize(
    ("mode", "change", "changed", "message"),
    [
        ("overwrite", [], {}, "mode overwrite is refused: an outbox only takes events in; use mode('append')"),
        ("append", ["issued_on"], {}, "column 'issued_on' of billing.invoice is NOT NULL without a default"),
        ("append", [], {"sequenceColumn": "amount_"}, "column 'amount_' of option sequenceColumn is not in the Data"),
        ("append", [], {"colour": "red"}, "option 'colour' is unknown; known are url, dbtable"),
    ],
    ids=["overwrite", "missing", "named", "unknown"],
)
def test_what_is_refused_is_refused_by_save_before_any_task_runs(
    spark: SparkSession, options: Options, mode: str, change: list[str], changed: Options, message: str
) -> None:
    group = f"{options['url']} {message}"
    spark.sparkContext.setJobGroup(group, "none of this runs")
    try:
        with pytest.raises(SAVE_FAILS) as refused:
            invoices(spark).drop(*change).write.format("outbox").mode(mode).options(**options, **changed).save()
    finally:
        spark.sparkContext.setJobGroup("", "")

    assert str(outbox_spark.reason(refused.value)).startswith(message)
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(group) == []


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (r"concat(invoice_id, '\0')", "column 'invoice_id' holds a NUL character"),
        ("if(true, null, invoice_id)", "column 'invoice_id' is NULL"),
    ],
    ids=["nul", "null"],
)
def test_a_row_that_the_database_would_refuse_is_named_by_its_key(
    spark: SparkSession, options: Options, connection: psycopg.Connection, faulty: str, message: str
) -> None:
    good = f.col("invoice_id")
    frame = invoices(spark).withColumn("invoice_id", f.when(good == "INV-40", f.expr(faulty)).otherwise(good))

    with pytest.raises(SAVE_FAILS) as refused:
        save(frame, options)

    assert f"the row with customer_id 'C5' cannot be written to billing.invoice and the outbox: {message}" in str(
        outbox_spark.reason(refused.value)
    )
    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []


def test_a_row_that_the_database_refuses_of_a_task_is_named_in_one_line(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    frame = invoices(spark).selectExpr("*", "if(invoice_id = 'INV-40', '{oops', '{}') AS body")

    with pytest.raises(SAVE_FAILS) as refused:
        save(frame, options, payloadColumn="body")

    assert outbox_spark.reason(refused.value) == (
        "the row with customer_id 'C5' cannot be written to billing.invoice and the outbox: "
        "column 'payload': invalid input syntax for type json (Token \"oops\" is invalid.)"
    )
    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []


def test_two_events_with_one_sequence_are_refused(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    frame = invoices(spark).withColumn("line", f.lit("1"))

    with pytest.raises(SAVE_FAILS) as refused:
        save(frame, options, sequenceColumn="line")

    assert "have the same message id, so consumers would take them for one" in str(outbox_spark.reason(refused.value))
    assert counts(connection) == (0, 0, 0)
