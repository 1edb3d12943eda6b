"""Bill a shop's purchases day by day: invoices, their lines, customers' totals and events, one transaction a day.

    spark-submit examples/pipeline/daily.py --input purchases/ --from 1997-01-01 --to 1997-01-31 --url postgresql://user@host/db

Any day may be run again, in any order. What is written already is recognised. When the purchases of a day have changed,
the difference is written. New invoices are `InvoiceIssued`, those that differ `InvoiceCorrected`, each event with its
whole invoice. Before anything of a day is written its bills pass the data tests of sales_tests.py.

The last line on stdout is JSON with the days. Exit code 0: all of them are written or recognised. 1: failed, the days
before are written and nothing of this one. 2: the arguments cannot be.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import purchases
from outbox_spark import OutboxBatch, WriteLimits
from outbox_spark.connection import connect, conninfo
from outbox_spark.jobs.command import (
    JobError,
    add_database,
    check_database,
    day,
    refuse,
    run,
    session,
    whole_number,
)
from outbox_spark.ledger import Batch
from outbox_spark.reading.table import Database
from sales import MONEY, Bills, bill, of_days, reached, read_known
from sales_tests import DataTestError, Figures, examine

PROGRAM = "daily.py"
APP_ID = "sales"  # the ledger's name of every run; its version is the number of the run
TABLES = (Path(__file__).resolve().parent / "sales.sql").read_text()

RUN = f"run long, day date, purchases long, quarantined long, invoices long, lines long, amount {MONEY}"
# Columns of bills that no table has.
OF_BILLS = (
    *("file", "line_number", "is_changed", "is_withdrawn"),
    *("lines", "previous_amount", "change", "known_total", "known_tiers"),
)

LAST_RUN = "SELECT coalesce(max(run), 0) FROM sales.run"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    days = _days(options)
    return run(PROGRAM, lambda: _bill_days(options, days))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Bill the purchases of days: invoices, lines, totals and events, in one transaction a day.",
    )
    parser.add_argument("--input", required=True, help="files of purchases, as invoices.py takes them")
    parser.add_argument("--day", action="append", type=day, help="may be repeated")
    parser.add_argument("--from", dest="first", type=day, help="with --to, in place of --day")
    parser.add_argument("--to", dest="last", type=day, help="the last day, inclusive")
    parser.add_argument("--withdraw", action="store_true", help="let lines go that the input does not have any more")
    parser.add_argument(
        "--partitions", type=whole_number, default=4, help="tasks that compute and write; default %(default)s"
    )
    add_database(parser)
    return parser


def _days(options: argparse.Namespace) -> list[date]:
    """Return the days in order, and refuse arguments that cannot be (exit code 2)."""
    check_database(PROGRAM, options)
    if options.partitions < 1:
        refuse(PROGRAM, "--partitions takes at least 1")
    if "://" not in options.input and "*" not in options.input and not Path(options.input).exists():
        refuse(PROGRAM, f"--input: there is no {options.input}")
    if bool(options.day) == bool(options.first or options.last) or bool(options.first) != bool(options.last):
        refuse(PROGRAM, "give the days with --day, or with --from and --to")
    if options.day:
        return sorted(set(options.day))
    if options.first > options.last:
        refuse(PROGRAM, f"--from {options.first} is after --to {options.last}")
    return [options.first + timedelta(days=number) for number in range((options.last - options.first).days + 1)]


def _bill_days(options: argparse.Namespace, days: Sequence[date]) -> dict[str, Any]:
    with connect(conninfo(options.url)) as connection:
        connection.execute(TABLES)
    with session(f"bills of {days[0]} to {days[-1]}") as spark:
        # A day is small: Spark's 200 partitions took several times as long.
        spark.conf.set("spark.sql.shuffle.partitions", options.partitions)
        parsed = purchases.parse(purchases.read_lines(spark, options.input))
        # Not persist(): Spark would number lines and ask for the date again for what it has lost.
        wanted = of_days(parsed, days[0], days[-1]).localCheckpoint()
        done = []
        for number, each in enumerate(days, start=1):
            spark.sparkContext.setJobGroup("daily", f"day {each}, {number} of {len(days)}")
            told = bill_day(spark, wanted, each, options)
            print(f"{PROGRAM}: {number} of {len(days)}: {each}: {_words(told)}", file=sys.stderr)
            done.append(told)
    return {"days": done}


def bill_day(spark: SparkSession, parsed: DataFrame, day: date, options: argparse.Namespace) -> dict[str, Any]:
    """Bill one day, unless its bills are written as they ought to be.

    Totals are computed from what was read, so each run must build on the one before it. Runs are numbered, the ledger
    takes each number once, and a run that comes second with a number looks again: nobody holds a lock meanwhile.
    """
    database = Database(conninfo(options.url))
    while True:
        number = _last_run(database) + 1
        bills = bill(parsed, read_known(spark, database, day), day)
        try:
            figures = examine(bills, day, may_withdraw=options.withdraw)
        except DataTestError as error:
            raise JobError(str(error)) from None
        told = {"day": str(day), **{name: _plain(value) for name, value in asdict(figures).items()}}
        if not figures.has_news:
            return {**told, "recognised": True}
        taken_by = _write(spark, bills, _note(figures, day, number), options)
        if taken_by is None:
            return {**told, "recognised": False, "run": number}
        if _last_run(database) < number:
            raise JobError(
                f"{day}: nothing of the day was written: the ledger has batch {APP_ID!r} version {number}, "
                "but sales.run has no such run. Was one of them restored without the other?"
            )
        print(f"{PROGRAM}: {day}: another run has written meanwhile: look again", file=sys.stderr)


def _last_run(database: Database) -> int:
    with connect(database.info) as connection:
        ((number,),) = connection.execute(LAST_RUN).fetchall()
    return int(number)


def _note(figures: Figures, day: date, number: int) -> dict[str, Any]:
    """Make the row of sales.run."""
    return {
        "run": number,
        "day": day,
        "purchases": figures.purchases,
        "quarantined": figures.quarantined,
        "invoices": figures.changed_invoices,
        "lines": figures.changed_lines,
        "amount": figures.amount,
    }


def _write(spark: SparkSession, bills: Bills, note: dict[str, Any], options: argparse.Namespace) -> Batch | None:
    """Write what is missing, in one transaction. Return the batch of another run that has taken the number."""
    issued_on = f.lit(note["day"]).alias("issued_on")
    lines, invoices = (frame.where("is_changed") for frame in (bills.lines, bills.invoices))
    # Each column has the name that it has in its table.
    upserted = {
        "invoice_line": (lines.withColumn("issued_on", issued_on).drop(*OF_BILLS), ["invoice_id", "position"]),
        "invoice": (invoices.withColumn("issued_on", issued_on).drop(*OF_BILLS), ["invoice_id"]),
        "customer": (bills.customers.drop(*OF_BILLS), ["customer_id"]),
    }
    quarantined = bills.quarantined.withColumn("run", f.lit(note["run"]).cast("long"))
    with OutboxBatch(
        spark,
        url=options.url,
        app_id=APP_ID,
        version=note["run"],
        limits=WriteLimits(num_partitions=options.partitions),
        outbox_schema=options.outbox_schema,
    ) as batch:
        batch.rows(spark.createDataFrame([note], RUN), table="sales.run")
        batch.rows(
            quarantined.select("run", "issued_on", "file", "line_number", "reason", "line"), table="sales.quarantine"
        )
        for table, (frame, keys) in upserted.items():
            batch.rows(frame, table=f"sales.{table}", upsert_keys=keys)
        batch.events(
            invoices,
            aggregate_type="customer",
            aggregate_id=f.col("customer_id"),
            event_type=f.when(f.col("revision") == 1, "InvoiceIssued").otherwise("InvoiceCorrected"),
            payload=f.struct(
                *("invoice_id", "customer_id", issued_on, "revision", "quantity", "amount", "previous_amount", "lines")
            ),
            message_key=f.concat_ws("/", "invoice_id", "revision"),
        )
        # Behind those of the invoices: a batch has its events in the order in which their DataFrames were added.
        batch.events(
            reached(bills.customers),
            aggregate_type="customer",
            aggregate_id=f.col("customer_id"),
            event_type="CustomerReachedTier",
            payload=f.struct("customer_id", "tier", "threshold", "total", f.lit(note["day"]).alias("reached_on")),
            message_key=f.col("tier"),
        )
    return batch.recognised


def _plain(value: object) -> object:
    return value if isinstance(value, int) else str(value)


def _words(told: dict[str, Any]) -> str:
    if told["recognised"]:
        return f"{told['purchases']} purchases, all of them written before"
    return (
        f"{told['purchases']} purchases, {told['new_quarantined']} more in quarantine, "
        f"{told['changed_invoices']} invoices issued or corrected, totals changed by {told['amount']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
