"""How fast Spark reads a day of the outbox, next to Spark's JDBC reader with as many partitions.

    python -m bench.spark_read

A private PostgreSQL (`fsync` on) holds one closed day of sent rows. Three readers take the same columns of all of them
into Spark's `noop` sink. What arrives is counted each time.

- JDBC by ranges of ids, as its documentation has it, so that each task scans the day
- JDBC by ranges of blocks, as `outbox` divides it
- `outbox`

Then `outbox` reads a part of the rows, and a part of the columns. Spark is asked for them first (`where`, `select`),
then the database (an option, a schema). Spark hands a Python data source no columns. It hands it filters, and keeps
them for later queries of the DataFrame. So `outbox` takes no filter (docs/decisions/0022-read-by-blocks.md).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from time import monotonic

import psycopg
from pyspark.sql import DataFrame, DataFrameReader, Observation, SparkSession
from pyspark.sql import functions as f

import outbox_spark
from bench.frame.error import BenchmarkError
from bench.frame.run import Bench, Column, Count, Figures, Run, main
from bench.frame.servers import private_postgres
from bench.frame.spark_session import jdbc, spark_session
from tests.support.days import ADD_DAY, NAME

AGO = 3  # days: a closed one
FILL = """
    INSERT INTO outbox.message (message_id, aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT gen_random_uuid(), 'customer', lpad((n %% 23570)::text, 5, '0'), 'InvoiceIssued',
        format('{"invoice_id":"%%s-%%s","customer_id":"%%s","issued_on":"1997-01-01","quantity":%%s,"amount":%%s.77,'
            '"note":"%%s"}', n %% 23570, n, n %% 23570, n %% 5, n %% 9973, repeat('x', 90))::json,
        'sent', %(midnight)s + interval '1 day' * (n::float8 / (%(rows)s + 1))
    FROM generate_series(1, %(rows)s) AS n
"""
CLEAR_UP = "VACUUM (FREEZE, ANALYZE) outbox.message_sent"
COLUMNS = ("id", "message_id", "aggregate_type", "aggregate_id", "event_type", "payload", "sent_at")
QUERY = """
    SELECT id, message_id::text, aggregate_type, aggregate_id, event_type, payload::text, sent_at, ctid AS place
    FROM outbox.{day}
"""


class ReadWay(StrEnum):
    """Who reads."""

    JDBC = "JDBC by ids"
    JDBC_BLOCKS = "JDBC by blocks"
    OUTBOX = "outbox"


class PartWay(StrEnum):
    """How a part is asked for."""

    WHERE = "where(id <= ...)"
    OPTION = "endingId"
    SELECT = "select(id, aggregate_id)"
    SCHEMA = "load(schema=id, aggregate_id)"


@dataclass(frozen=True, slots=True)
class Filled:
    """The day that is read."""

    url: str
    table: str
    rows: int
    blocks: int
    characters: int  # of all payloads


def measure(*, rows: Count = 3_000_000, rounds: Count = 3, partitions: Count = 8, run: Bench) -> None:
    """Measure Spark's reads of the outbox.

    Parameters
    ----------
    rows
        Sent rows of the day.
    rounds
        How often each reader is measured, after one round to warm up; each starts with another reader.
    partitions
        Tasks; two run at a time.
    """
    read = run.table(
        f"{rows:,} sent rows of a day", Column("rows/s", "rate"), Column("of JDBC", "rate", 2, is_ratio=True)
    )
    with _filled_day(run, rows) as day, spark_session() as session:
        readers = _readers(session, day, partitions)
        whole = {"rows": day.rows, "characters": day.characters}
        read.measure({way: partial(_measure, open_, day, whole) for way, open_ in readers.items()}, rounds, warm_up=1)
        parts = _parts(session, day, partitions)
        for title, asked, instead, left in (
            ("a tenth of the rows", PartWay.WHERE, PartWay.OPTION, day.rows // 10),
            ("two columns", PartWay.SELECT, PartWay.SCHEMA, day.rows),
        ):
            table = run.table(title, Column("rows/s", "rate"), Column("of that", "rate", 2, is_ratio=True))
            table.measure(
                {way: partial(_measure, parts[way], day, {"rows": left}) for way in (asked, instead)},
                rounds,
                warm_up=1,
            )


@contextmanager
def _filled_day(run: Run, rows: int) -> Iterator[Filled]:
    with private_postgres(run) as (_, url):
        with run.status("filling the day"), psycopg.connect(url, autocommit=True) as connection:
            ((midnight,),) = connection.execute(ADD_DAY, {"ago": AGO}).fetchall()
            connection.execute(FILL, {"midnight": midnight, "rows": rows})
            connection.execute(CLEAR_UP)
            ((table,),) = connection.execute(NAME, ["message_sent", AGO]).fetchall()
            about = "SELECT pg_relation_size('outbox.{0}') / 8192, sum(length(payload::text))::bigint FROM outbox.{0}"
            ((blocks, characters),) = connection.execute(about.format(table).encode()).fetchall()
        yield Filled(url, table, rows, blocks, characters)


def _readers(session: SparkSession, day: Filled, partitions: int) -> dict[ReadWay, Callable[[], DataFrame]]:
    outbox_spark.register(session)
    url, login = jdbc(day.url)
    properties, query = {**login, "fetchsize": "10000"}, f"({QUERY.format(day=day.table)}) AS sent"
    borders = [day.blocks * piece // partitions for piece in range(partitions)] + [2**32 - 1]
    blocks = [f"place >= '({low},0)' AND place < '({high},0)'" for low, high in pairwise(borders)]
    types = ", ".join(f"{name} {'BIGINT' if name == 'id' else 'STRING'}" for name in COLUMNS[:-1])
    by_jdbc = partial(session.read.jdbc, url, query, properties=properties)
    return {
        ReadWay.JDBC: lambda: by_jdbc("id", 1, day.rows + 1, partitions).select(*COLUMNS),
        ReadWay.JDBC_BLOCKS: lambda: by_jdbc(predicates=blocks).select(*COLUMNS),
        ReadWay.OUTBOX: lambda: (
            session.read.format("outbox")
            .options(url=day.url, numPartitions=str(partitions))
            .load(schema=f"{types}, sent_at TIMESTAMP")
        ),
    }


def _parts(session: SparkSession, day: Filled, partitions: int) -> dict[PartWay, Callable[[], DataFrame]]:
    def read(**more: str) -> DataFrameReader:
        return session.read.format("outbox").options(url=day.url, numPartitions=str(partitions), **more)

    last = day.rows // 10
    return {
        PartWay.WHERE: lambda: read().load().where(f"id <= {last}"),
        PartWay.OPTION: lambda: read(endingId=str(last)).load(),
        PartWay.SELECT: lambda: read().load().select("id", "aggregate_id"),
        PartWay.SCHEMA: lambda: read().load(schema="id BIGINT, aggregate_id STRING"),
    }


def _measure(read: Callable[[], DataFrame], day: Filled, expected: Mapping[str, int]) -> Figures:
    seen, columns = Observation(), {"rows": f.count(f.lit(1)), "characters": f.sum(f.length("payload"))}
    counted = read().observe(seen, *(columns[name].alias(name) for name in expected))
    started = monotonic()
    counted.write.format("noop").mode("overwrite").save()
    seconds = monotonic() - started
    if seen.get != expected:
        raise BenchmarkError(f"of {day} {expected} were asked for, and {seen.get} arrived")
    return {"rate": day.rows / seconds}


if __name__ == "__main__":
    main(measure)
