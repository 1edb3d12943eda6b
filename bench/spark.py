"""How fast Spark writes invoices with their events: `python -m bench.spark`, next to Spark's own JDBC writer.

The reference is the JDBC writer tuned (reWriteBatchedInserts, 10,000 rows a batch) doing the two tables in two
transactions. Nothing keeps them together, and a task that is tried again writes its rows again. Ours is written
once: in one transaction for both, by way of staging tables or by a single task; or in one for each partition. All
take the same DataFrame out of Spark's cache, and their interval is that of `save()`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
from pyspark.sql import DataFrame, SparkSession

import outbox_spark
from bench.frame.error import BenchmarkError
from bench.frame.run import Bench, Column, Count, Figures, Run, main
from bench.frame.servers import make_wal_files, private_postgres
from bench.frame.spark_session import jdbc, spark_session

BILLING = (Path(__file__).resolve().parents[1] / "examples" / "pipeline" / "billing.sql").read_text()
AGGREGATE_TYPE, EVENT_TYPE = "customer", "InvoiceIssued"
CUSTOMERS = 23_570  # as many as CDNOW has

MAKE_INVOICES = """
    SELECT concat(lpad(id % {customers}, 5, '0'), '-', id) AS invoice_id,
        lpad(id % {customers}, 5, '0') AS customer_id, date_add(date'1997-01-01', CAST(id % 540 AS int)) AS issued_on,
        CAST(id % 5 + 1 AS int) AS quantity, CAST(id % 9973 + 0.77 AS decimal(12, 2)) AS amount
    FROM range(0, {rows}, 1, {partitions})
"""
CHECK = """
    SELECT (SELECT count(*) FROM billing.invoice), (SELECT count(*) FROM outbox.message),
        (SELECT sum(amount) FROM billing.invoice),
        (SELECT sum((payload->>'amount')::numeric) FROM outbox.message)
"""


class Writer(StrEnum):
    """Who writes."""

    JDBC = "JDBC tuned, two transactions"
    OUTBOX = "outbox, one transaction"
    OUTBOX_SEQUENCE = "outbox, ids by sequence"
    OUTBOX_SINGLE = "outbox, singleTask"
    OUTBOX_PIECES = "outbox, atomic=partition"


def measure(*, rows: Count = 600_000, rounds: Count = 3, partitions: Count = 4, run: Bench) -> None:
    """Measure Spark's writes into the outbox.

    Parameters
    ----------
    rows
        Invoices, each with its event.
    rounds
        How often each writer is measured, after one round to warm up; each starts with another writer.
    partitions
        Partitions of the DataFrame; two tasks run at a time.
    """
    written = run.table(
        f"{rows:,} invoices with their events, rows of both tables",
        Column("rows/s", "rate"),
        Column("of JDBC", "rate", 2, is_ratio=True),
    )
    with database(run) as url, spark_session() as session:
        frame, money = cached_invoices(run, session, rows, partitions)
        sides = {
            str(writer): partial(measure_write, url, write, rows, money)
            for writer, write in writers(session, frame, url, partitions).items()
        }
        written.measure(sides, rounds, warm_up=1)


@contextmanager
def database(run: Run) -> Iterator[str]:
    with private_postgres(run) as (_, url):
        with psycopg.connect(url) as connection:
            connection.execute(BILLING)
        make_wal_files(url)
        yield url


def cached_invoices(run: Run, session: SparkSession, rows: int, partitions: int) -> tuple[DataFrame, Any]:
    """Make the invoices and return them, in Spark's cache, with the sum of their money."""
    with run.status(f"making {rows:,} invoices"):
        frame = session.sql(MAKE_INVOICES.format(customers=CUSTOMERS, rows=rows, partitions=partitions)).cache()
        return frame, frame.selectExpr("sum(amount)").collect()[0][0]


def writers(session: SparkSession, frame: DataFrame, url: str, partitions: int) -> dict[Writer, Callable[[], None]]:
    """Return what writes this frame, and its events, in each way."""
    outbox_spark.register(session)
    events = frame.selectExpr(
        f"'{AGGREGATE_TYPE}' AS aggregate_type",
        "customer_id AS aggregate_id",
        f"'{EVENT_TYPE}' AS event_type",
        "to_json(struct(*)) AS payload",
    )

    def by_jdbc() -> None:
        _save_by_jdbc(frame, url, "billing.invoice")
        _save_by_jdbc(events, url, "outbox.message")

    pieces = {"atomic": "partition", "numPartitions": str(partitions), "txnAppId": "bench", "txnVersion": "1"}
    return {
        Writer.JDBC: by_jdbc,
        Writer.OUTBOX: lambda: _save_to_outbox(frame, url),
        Writer.OUTBOX_SEQUENCE: lambda: _save_to_outbox(frame, url, sequenceColumn="invoice_id"),
        Writer.OUTBOX_SINGLE: lambda: _save_to_outbox(frame.coalesce(1), url, singleTask="true"),
        Writer.OUTBOX_PIECES: lambda: _save_to_outbox(frame, url, **pieces),
    }


def _save_by_jdbc(frame: DataFrame, url: str, table: str) -> None:
    address, login = jdbc(url)
    frame.write.format("jdbc").mode("append").options(
        # Without stringtype the server refuses text in a json column.
        url=f"{address}?reWriteBatchedInserts=true&stringtype=unspecified",
        dbtable=table,
        batchsize="10000",
        **login,
    ).save()


def _save_to_outbox(frame: DataFrame, url: str, **more: str) -> None:
    frame.write.format("outbox").mode("append").options(
        url=url,
        dbtable="billing.invoice",
        aggregateType=AGGREGATE_TYPE,
        aggregateIdColumn="customer_id",
        eventType=EVENT_TYPE,
        **more,
    ).save()


def measure_write(url: str, write: Callable[[], None], rows: int, money: Any) -> Figures:
    """Write into empty tables, and look that all of it is there."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE billing.invoice, outbox.message_pending, outbox.batch")
        connection.execute("CHECKPOINT")  # so that nobody pays for the writes of the one before
        started = monotonic()
        write()
        seconds = monotonic() - started
        found = connection.execute(CHECK).fetchone()
    if found != (rows, rows, money, money):
        raise BenchmarkError(f"rows or money do not add up: {found}, not {rows} invoices and events of {money}")
    return {"rate": 2 * rows / seconds}


if __name__ == "__main__":
    main(measure)
