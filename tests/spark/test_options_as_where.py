"""An option of a read gives the rows that `where()` gives."""

import random
from collections.abc import Iterator
from datetime import date, timedelta

import psycopg
import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructField, StructType

from outbox_spark.reading.columns import COLUMNS
from outbox_spark.reading.plan import plan_read, plan_tasks
from outbox_spark.reading.reader import read_task
from outbox_spark.spark_api import arrow_schema
from tests.spark.releases import with_sources
from tests.support.days import make_days

SCHEMA = StructType([StructField(name, kind) for name, kind in COLUMNS.items()])
FIRST = date(2026, 11, 1)
TYPES = ["InvoicePaid", "invoicepaid", "InvoicePaid ", "Straße", "STRASSE", "Ärger", "A\u0308rger", "a_b%", "o'clock"]
KEYS = [None, *TYPES, "C1", "c1", "10", "9"]
# At the ends of days by UTC, which are in the middle of one by the session's zone.
ADD = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT types[1 + n %% cardinality(types)], keys[1 + n %% cardinality(keys)], types[1 + n / 3 %% cardinality(types)],
        '{}', 'sent', %(first)s::date::timestamp AT TIME ZONE 'UTC' + interval '1 day' * (n / 60)
            + (ARRAY['0', '1 day -1 us', '20 h']::interval[])[1 + n %% 3]
    FROM generate_series(0, 179) AS n, (SELECT %(types)s::text[] AS types, %(keys)s::text[] AS keys) AS given
"""


def generated(count: int, choose: random.Random) -> Iterator[dict[str, str]]:
    """Yield options with one to four conditions, by values that rows have or just miss."""
    for _ in range(count):
        ids = sorted(choose.randrange(1, 200) for _ in range(2))
        days = sorted(FIRST + timedelta(choose.randrange(-1, 4)) for _ in range(2))
        every = {
            "aggregateType": choose.choice(TYPES),
            "aggregateId": str(choose.choice(KEYS[1:])),
            "eventType": choose.choice([*TYPES, "nothing"]),
            "startingId": str(ids[0]),
            "endingId": str(ids[1]),
            "startingDay": str(days[0]),
            "endingDay": str(days[1]),
        }
        names = choose.sample(list(every), choose.choice([1, 1, 2, 2, 3, 4]))
        yield {name: every[name] for name in names}


def as_where(options: dict[str, str]) -> Column:
    """Return what `where()` takes for these options: the table in docs/spark.md."""
    conditions = {
        "aggregateType": lambda value: f.col("aggregate_type") == value,
        "aggregateId": lambda value: f.col("aggregate_id") == value,
        "eventType": lambda value: f.col("event_type") == value,
        "startingId": lambda value: f.col("id") >= int(value),
        "endingId": lambda value: f.col("id") <= int(value),
        "startingDay": lambda value: f.col("sent_day") >= f.lit(date.fromisoformat(value)),
        "endingDay": lambda value: f.col("sent_day") <= f.lit(date.fromisoformat(value)),
    }
    whole = f.lit(True)
    for name, value in options.items():
        whole = whole & conditions[name](value)
    return whole


def read(url: str, options: dict[str, str]) -> pa.Table:
    """Return what the tasks of a read give, in this process."""
    plan = plan_read({"url": url, **options}, SCHEMA)
    batches = [batch for task in plan_tasks(plan) for batch in read_task(plan, task)]
    return pa.Table.from_batches(batches, schema=arrow_schema(SCHEMA))


@with_sources  # 3.5 makes no DataFrame of an Arrow table
def test_an_option_gives_the_rows_that_where_gives(
    spark: SparkSession, connection: psycopg.Connection, database_url: str
) -> None:
    connection.execute(make_days("%s", "3"), [FIRST])
    connection.execute(ADD, {"types": TYPES, "keys": KEYS, "first": FIRST})
    every_option = list(generated(24, random.Random(7)))
    whole = read(database_url, {})
    conditions = [as_where(options).alias(str(number)) for number, options in enumerate(every_option)]

    by_where = spark.createDataFrame(whole).select("id", *conditions).toArrow().to_pylist()

    found = set()
    for number, options in enumerate(every_option):
        ids = sorted(read(database_url, options)["id"].to_pylist())
        assert ids == sorted(row["id"] for row in by_where if row[str(number)]), options
        found.add(len(ids))
    assert whole.num_rows == 180
    assert len(found) > 5  # they select this and that
