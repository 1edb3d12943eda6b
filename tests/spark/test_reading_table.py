"""Any table, read in parts: each row once, all of them at one moment."""

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from pyspark.sql import SparkSession

from outbox_spark import TableError
from outbox_spark.connection import conninfo
from outbox_spark.reading.table import Database, one_moment, read_table

pytestmark = pytest.mark.jobs

MAKE = """
    CREATE TABLE billing.thing (id integer, day date, amount numeric(12, 2)) PARTITION BY RANGE (day);
    CREATE TABLE billing.thing_1 PARTITION OF billing.thing FOR VALUES FROM ('2026-01-01') TO ('2026-01-02');
    CREATE TABLE billing.thing_2 PARTITION OF billing.thing FOR VALUES FROM ('2026-01-02') TO ('2026-01-03');
    INSERT INTO billing.thing
        SELECT n, date '2026-01-01' + (n > 4500)::integer, n + 0.25 FROM generate_series(1, 5000) AS n;
    CREATE VIEW billing.seen AS SELECT * FROM billing.thing;
"""
THING, SCHEMA = Identifier("billing", "thing"), "id int, amount decimal(12, 2)"


def test_every_row_is_read_once_whatever_its_partition_and_however_many_tasks(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    connection.execute(MAKE)
    database = Database(conninfo(database_url))

    thrice = read_table(spark, database, THING, SCHEMA, where=SQL("(id > 10 OR id = 3)"), partitions=3)

    assert thrice.rdd.getNumPartitions() == 3
    rows = thrice.collect()
    assert sorted(row["id"] for row in rows) == [3, *range(11, 5001)]
    assert all(str(row["amount"]) == f"{row['id']}.25" for row in rows)


def test_all_reads_of_a_moment_see_it_and_later_ones_fail(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    connection.execute(MAKE)
    with one_moment(database_url) as database:
        before = read_table(spark, database, THING, SCHEMA, partitions=2)
        connection.execute("UPDATE billing.thing SET amount = 0 WHERE id > 1; DELETE FROM billing.thing WHERE id = 1")

        assert before.where("amount > 0").count() == 5000
    with pytest.raises(Exception, match=r"a table could not be read: .*snapshot .* does not exist"):
        before.count()


def test_what_cannot_be_read_is_refused_by_name(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    connection.execute(MAKE)
    database = Database(conninfo(database_url))

    with pytest.raises(TableError, match=r'"billing"\."none" cannot be read: relation "billing.none" does not exist'):
        read_table(spark, database, Identifier("billing", "none"), SCHEMA)
    with pytest.raises(TableError, match=r'column "weight" does not exist'):
        read_table(spark, database, THING, "weight int")
    with pytest.raises(TableError, match=r'"billing"\."seen" is no table, whose blocks could be read'):
        read_table(spark, database, Identifier("billing", "seen"), SCHEMA)
