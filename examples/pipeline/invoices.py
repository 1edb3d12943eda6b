"""Make an invoice of each purchase in a file: billing.invoice and InvoiceIssued events, in one transaction, once.

    spark-submit examples/pipeline/invoices.py --input CDNOW_master.txt --url postgresql://user@host/database

Lines that are no purchase go to billing.quarantine before that, in a separate transaction under the name of the batch.
Run again before the batch is committed, the job replaces them. Afterwards it writes nothing. So the quarantine of a
batch that is in the ledger (outbox.batch) is exactly what its file has.

The last line on stdout is JSON with the counts (spark-submit brings what goes to stderr there too). Exit code 0:
written, or recognised as written before; 1: failed, nothing of the batch was written; 2: the arguments cannot be.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import file_digest
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import outbox_spark
import purchases
from outbox_spark.connection import connect, conninfo
from outbox_spark.jobs.command import JobError, add_database, check_database, refuse, run, session, whole_number
from outbox_spark.ledger import count_repeat, read

TABLES = (Path(__file__).resolve().parent / "billing.sql").read_text()
PROGRAM = "invoices.py"

TAKE_BATCH = (
    "SELECT pg_advisory_xact_lock(hashtextextended('billing.quarantine/' || %(app_id)s || '/' || %(version)s, 0))"
)
FORGET_QUARANTINE = "DELETE FROM billing.quarantine WHERE app_id = %(app_id)s AND version = %(version)s"
COPY_QUARANTINE = "COPY billing.quarantine (app_id, version, file, line_number, reason, line) FROM STDIN"
COUNT_QUARANTINE = "SELECT count(*) FROM billing.quarantine WHERE app_id = %(app_id)s AND version = %(version)s"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    batch = _batch(options)
    return run(PROGRAM, lambda: _recognised(options, **batch) or _run(options, batch))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Make an invoice of each purchase in a file, and its event, in one transaction and once.",
        epilog="The file: customer, day as YYYYMMDD, number of CDs and dollars, in columns of blanks; a header may "
        "stand in its first line. What does not parse goes to billing.quarantine with its reason.",
    )
    parser.add_argument("--input", required=True, help="the file of purchases; what Spark reads, or a local path")
    add_database(parser)
    parser.add_argument("--app-id", help="name of the batch, with --version; default: invoices and the file's content")
    parser.add_argument("--version", type=whole_number, help="number of the batch; the same batch is written once")
    parser.add_argument("--partitions", type=whole_number, default=4, help="tasks that write; default %(default)s")
    return parser


def _batch(options: argparse.Namespace) -> dict[str, Any]:
    """Name the batch, and refuse arguments that cannot be (exit code 2)."""
    check_database(PROGRAM, options)
    if (options.app_id is None) != (options.version is None):
        refuse(PROGRAM, "--app-id and --version name a batch together: give both or neither")
    if options.partitions < 1:
        refuse(PROGRAM, "--partitions takes at least 1")
    path = Path(options.input)
    is_local = "://" not in options.input and "*" not in options.input
    if is_local and not path.exists():
        refuse(PROGRAM, f"--input: there is no file {options.input}")
    if options.app_id is not None:
        return {"app_id": options.app_id, "version": options.version}
    if not is_local or not path.is_file():
        refuse(
            PROGRAM, "--input is not one local file, whose content could name the batch: give --app-id and --version"
        )
    with path.open("rb") as file:
        # 60 bits, which a bigint holds; the same file is the same batch, under whatever name it lies.
        return {"app_id": "invoices", "version": int(file_digest(file, "sha256").hexdigest()[:15], 16)}


def _recognised(options: argparse.Namespace, *, app_id: str, version: int) -> dict[str, Any] | None:
    """Return what a batch that is committed has written; None when there is work to do."""
    batch = outbox_spark.committed(options.url, app_id, version, outbox_schema=options.outbox_schema)
    if batch is None:
        return None
    print(f"{PROGRAM}: {batch} is in the ledger already: nothing is written", file=sys.stderr)
    with connect(conninfo(options.url)) as connection:
        count_repeat(connection, options.outbox_schema, app_id=app_id, version=version)
        ((quarantined,),) = connection.execute(COUNT_QUARANTINE, {"app_id": app_id, "version": version}).fetchall()
    rows = batch.row_counts["rows"]
    return {
        "app_id": app_id,
        "version": version,
        "recognised": True,
        "quarantined": quarantined,
        "invoices": rows,
        "outbox_rows": batch.row_counts["messages"],
    }


def _run(options: argparse.Namespace, batch: dict[str, Any]) -> dict[str, Any]:
    if Path(options.input).is_file() and not Path(options.input).stat().st_size:
        raise JobError(f"{options.input} is empty; nothing was written")
    with connect(conninfo(options.url)) as connection:
        connection.execute(TABLES)
    with session(f"invoices of {Path(options.input).name}") as spark:
        started = time.monotonic()
        parsed = purchases.parse(purchases.read_lines(spark, options.input))
        _name_stage(spark, f"1 of 3: count the lines and purchases of {Path(options.input).name}")
        counts = purchases.count(parsed)
        if counts.lines == 0:
            raise JobError(f"{options.input} has no lines; nothing was written")
        if counts.purchases == 0:
            raise JobError(_wrong_shape(options.input, parsed, counts))
        _name_stage(spark, "2 of 3: write the lines that are no purchase to billing.quarantine")
        _quarantine(options, batch, purchases.quarantined(parsed) if counts.quarantined else None)
        _name_stage(spark, "3 of 3: write billing.invoice and its events to the outbox, in one transaction")
        write_started = time.monotonic()
        _write(purchases.invoices(parsed, options.partitions), options, **batch)
        now = time.monotonic()
    return {
        **batch,
        "recognised": False,
        **asdict(counts),
        "invoices": counts.purchases,
        "outbox_rows": counts.purchases,
        "seconds": round(now - started, 3),
        "write_seconds": round(now - write_started, 3),
        "rows_per_second": round(2 * counts.purchases / (now - write_started)),
    }


def _name_stage(spark: SparkSession, name: str) -> None:
    """Name what follows in Spark's web page."""
    spark.sparkContext.setJobGroup("invoices", name)


def _quarantine(options: argparse.Namespace, batch: dict[str, Any], lines: DataFrame | None) -> None:
    """Make billing.quarantine hold these lines of the batch and no others, unless the batch is committed."""
    with connect(conninfo(options.url)) as connection, connection.transaction(), connection.cursor() as cursor:
        cursor.execute(TAKE_BATCH, batch)
        if read(connection, options.outbox_schema, **batch) is not None:
            return  # by a twin of this run, in the meantime
        cursor.execute(FORGET_QUARANTINE, batch)
        if lines is not None:
            with cursor.copy(COPY_QUARANTINE) as copy:
                for row in lines.toLocalIterator():
                    copy.write_row((*batch.values(), row.file, row.line_number, row.reason, row.line))


def _write(invoices: DataFrame, options: argparse.Namespace, *, app_id: str, version: int) -> None:
    invoices.write.format("outbox").mode("append").options(
        url=options.url,
        dbtable="billing.invoice",
        aggregateType="customer",  # whose events are kept in order
        aggregateIdColumn="customer_id",
        eventType="InvoiceIssued",
        sequenceColumn="invoice_id",
        txnAppId=app_id,
        txnVersion=str(version),
        outboxSchema=options.outbox_schema,
    ).save()


def _wrong_shape(name: str, parsed: DataFrame, counts: purchases.Counts) -> str:
    first = purchases.quarantined(parsed).orderBy("file", "line_number").first()
    example = "" if first is None else f" (line {first.line_number} {first.reason})"
    return (
        f"{name} has no purchase in its {counts.lines} lines{example}; nothing was written. A line is "
        "customer, day as YYYYMMDD, number of CDs and dollars, in columns of blanks"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
