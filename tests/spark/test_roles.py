"""The role `outbox_spark` of config/roles.sql, with grants on single columns of the business table."""

from collections.abc import Iterator

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.prepare import prepare
from tests.spark.frames import counts, invoices, save, staging_tables
from tests.support.roles import granted_roles

BATCH = {"txnAppId": "nightly", "txnVersion": "7"}


@pytest.fixture
def of_the_role(connection: psycopg.Connection, options: dict[str, str]) -> Iterator[dict[str, str]]:
    """Options of a good write by a login that has the role, and may not read the business table."""
    with granted_roles(connection, "spark_job"):
        connection.execute("""
            CREATE ROLE spark_job LOGIN PASSWORD 'weak' IN ROLE outbox_spark;
            GRANT USAGE ON SCHEMA billing TO spark_job;
            GRANT INSERT (invoice_id, customer_id, issued_on, quantity, amount) ON billing.invoice TO spark_job;
            ALTER TABLE billing.invoice ADD paid_on date;
        """)
        yield {**options, **BATCH, "user": "spark_job", "password": "weak", "stagingSchema": "outbox_staging"}


def test_grants_on_the_columns_that_are_written_are_enough(
    spark: SparkSession, of_the_role: dict[str, str], connection: psycopg.Connection
) -> None:
    save(invoices(spark), of_the_role)
    save(invoices(spark), of_the_role)

    assert counts(connection) == (100, 100, 1)
    assert staging_tables(connection) == []


def test_a_role_that_may_not_change_the_ledger_writes_and_is_recognised_all_the_same(
    spark: SparkSession, of_the_role: dict[str, str], connection: psycopg.Connection
) -> None:
    connection.execute("REVOKE UPDATE (row_counts) ON outbox.batch FROM outbox_spark")

    save(invoices(spark), of_the_role)
    save(invoices(spark), of_the_role)

    assert counts(connection) == (100, 100, 1)
    counted = "SELECT row_counts ?| '{seconds,repeats}' FROM outbox.batch"
    assert connection.execute(counted).fetchone() == (False,)


def test_a_column_without_its_grant_is_refused_by_name(spark: SparkSession, of_the_role: dict[str, str]) -> None:
    frame = invoices(spark).selectExpr("*", "CAST(NULL AS date) AS paid_on")

    with pytest.raises(outbox_spark.ColumnError) as refused:
        prepare(of_the_role, frame.schema, overwrite=False)

    assert str(refused.value) == (
        "column 'paid_on' of billing.invoice may not be written: "
        'GRANT INSERT ("paid_on") ON "billing"."invoice" TO "spark_job"'
    )


@pytest.mark.parametrize(
    ("partitions", "how"),
    [([-1], {}), ([-2], {}), ([-1], {"singleTask": "true"}), ([-2, 0], {"atomic": "partition", "numPartitions": "1"})],
)
def test_a_batch_entered_by_another_job_s_role_is_refused_and_not_taken_for_written(
    spark: SparkSession,
    of_the_role: dict[str, str],
    connection: psycopg.Connection,
    partitions: list[int],
    how: dict[str, str],
) -> None:
    connection.execute("CREATE ROLE spark_other IN ROLE outbox_spark")
    connection.execute("SET ROLE spark_other")
    for partition in partitions:
        connection.execute(
            "INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts)"
            " VALUES ('nightly', 7, %s, 1, gen_random_uuid(), '{\"rows\": 100}')",
            [partition],
        )
    connection.execute("RESET ROLE")

    try:
        with pytest.raises((PySparkException, outbox_spark.BatchError), match=r"in the ledger outbox\.batch by role"):
            save(invoices(spark).coalesce(1), of_the_role, **how)
    finally:
        connection.execute("DROP OWNED BY spark_other; DROP ROLE spark_other")

    assert counts(connection)[:2] == (0, 0)


def test_a_batch_in_the_ledger_by_the_role_of_all_jobs_is_refused(
    spark: SparkSession, of_the_role: dict[str, str], connection: psycopg.Connection
) -> None:
    connection.execute("SET ROLE outbox_spark")
    connection.execute(
        "INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts)"
        " VALUES ('nightly', 7, -1, 1, gen_random_uuid(), '{\"rows\": 100}')"
    )
    connection.execute("RESET ROLE")

    with pytest.raises((PySparkException, outbox_spark.BatchError), match=r"'outbox_spark'.*shares it with every"):
        save(invoices(spark).coalesce(1), of_the_role)

    assert counts(connection)[:2] == (0, 0)


def test_a_job_changes_no_row_of_another_in_the_ledger(
    of_the_role: dict[str, str], connection: psycopg.Connection
) -> None:
    enter = (
        "INSERT INTO outbox.batch (app_id, version, partitions, token, row_counts)"
        " VALUES ('nightly', 7, 1, gen_random_uuid(), '{}')"
    )
    change = "UPDATE outbox.batch SET row_counts = '{\"rows\": 1}' WHERE app_id = 'nightly'"
    connection.execute("CREATE ROLE spark_other IN ROLE outbox_spark")
    connection.execute("SET ROLE spark_job")
    connection.execute(enter)
    assert connection.execute(change).rowcount == 1

    connection.execute("RESET ROLE; SET ROLE spark_other")
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="was written by role spark_job"):
            connection.execute(change)
    finally:
        connection.execute("RESET ROLE; DROP ROLE spark_other")
