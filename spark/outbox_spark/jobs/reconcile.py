"""Reconcile business rows, their events and what a consumer applied, with the joins in Spark.

    outbox-spark reconcile --table billing.invoice --key-column invoice_id --amount-column amount \\
        --day-column issued_on --event-type InvoiceIssued --consumer billing --url postgresql://user@host/database

It changes nothing. `relay reconcile` is its sibling without Spark, for the outbox and its inboxes. Exit code 0: no
difference; 1: a difference, or it could not compare; 2: the arguments cannot be.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from psycopg.sql import Identifier
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_spark import OptionError
from outbox_spark.connection import connect, conninfo
from outbox_spark.jobs.command import (
    add_database,
    check_database,
    day,
    print_json,
    refuse,
    run,
    session,
    whole_number,
)
from outbox_spark.reconciling.compare import KINDS, check_keys, differences, joined, sums_by_day
from outbox_spark.reconciling.ends import Question, check_days, ends
from outbox_spark.reconciling.picture import FORMATS, draw

PROGRAM = "outbox-spark reconcile"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    question = _question(options)

    def show(report: dict[str, Any]) -> int:
        (print_json if options.output == "json" else _print_text)(report)
        return 1 if any(report["differences"].values()) else 0

    return run(PROGRAM, lambda: _reconcile(question, options), show)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Reconcile business rows, their events and what a consumer applied."
    )
    rows = parser.add_argument_group("business rows")
    rows.add_argument("--table", required=True, help="with its schema: billing.invoice")
    rows.add_argument("--key-column", required=True, help="tells a row; its event has the same value")
    rows.add_argument("--amount-column", required=True, help="the money")
    rows.add_argument("--day-column", required=True, help="the day by which it is summed up")
    rows.add_argument("--since", type=day, help="rows and events of this day and later")
    rows.add_argument("--until", type=day, help="of this day and earlier")
    events = parser.add_argument_group("events")
    events.add_argument(
        "--event-type", action="append", required=True, help="may be repeated; of a key's events the latest counts"
    )
    for name in ("key", "amount", "day"):
        events.add_argument(f"--payload-{name}", help=f"field of the payload; default: the name of --{name}-column")
    events.add_argument("--archive", help="folder of the archive, for the days that retention has dropped")
    inbox = parser.add_argument_group("consumer")
    inbox.add_argument("--consumer", help="its name in the inbox; without one the inbox is not looked at")
    inbox.add_argument("--inbox-url", help="where the inbox is in another database")
    inbox.add_argument("--inbox-schema", help="default: that of the outbox")
    inbox.add_argument("--grace", type=whole_number, default=60, help="seconds to be applied in; default %(default)s")
    told = parser.add_argument_group("report")
    told.add_argument("--output", choices=("text", "json"), default="text")
    told.add_argument("--limit", type=whole_number, default=20, help="of each kind, name so many; default %(default)s")
    told.add_argument("--report", help="folder below which all differences go as Parquet, by kind; replaced")
    told.add_argument("--picture", type=Path, help="sums by day, as .png or .svg; takes matplotlib")
    add_database(parser)
    return parser


def _question(options: argparse.Namespace) -> Question:
    """Refuse what cannot be asked (exit code 2)."""
    check_database(PROGRAM, options)
    schema, _, table = options.table.partition(".")
    if not table or "." in table:
        refuse(PROGRAM, f"--table takes schema.table, not {options.table!r}")
    if options.since and options.until and options.since > options.until:
        refuse(PROGRAM, f"--since {options.since} is after --until {options.until}")
    if options.consumer is None and (options.inbox_url or options.inbox_schema):
        refuse(PROGRAM, "--inbox-url and --inbox-schema are of a consumer: name it with --consumer")
    try:
        conninfo(options.inbox_url or options.url)
    except OptionError as error:
        refuse(PROGRAM, f"--inbox-url: {error}")
    if options.picture is not None and options.picture.suffix not in FORMATS:
        refuse(PROGRAM, f"--picture takes a file that ends in {' or '.join(FORMATS)}, not {options.picture}")
    if options.picture is not None and find_spec("matplotlib") is None:
        refuse(PROGRAM, "--picture takes matplotlib, which does not come with outbox-relay[spark]: install it")
    return Question(
        url=options.url,
        outbox_schema=options.outbox_schema,
        table=Identifier(schema, table),
        key_column=options.key_column,
        amount_column=options.amount_column,
        day_column=options.day_column,
        event_types=options.event_type,
        payload_key=options.payload_key or options.key_column,
        payload_amount=options.payload_amount or options.amount_column,
        payload_day=options.payload_day or options.day_column,
        since=options.since,
        until=options.until,
        archive=options.archive,
        inbox_url=options.inbox_url or options.url,
        inbox_schema=options.inbox_schema or options.outbox_schema,
        consumer=options.consumer,
        grace=options.grace,
    )


def _reconcile(question: Question, options: argparse.Namespace) -> dict[str, Any]:
    for url in (question.url, question.inbox_url):
        connect(conninfo(url)).close()  # rather than after Spark has started
    with session(f"reconciliation of {options.table}") as spark:
        # Spark does not know how many rows the ends have: one that it takes for small would have to fit into the heap.
        spark.conf.set("spark.sql.autoBroadcastJoinThreshold", "-1")
        report = reconcile(spark, question, limit=options.limit, folder=options.report)
    report = {"table": options.table, "event_types": question.event_types, "consumer": question.consumer, **report}
    if options.picture is not None:
        draw(report["days"], options.picture, table=options.table, event_types=question.event_types)
    return report


def reconcile(spark: SparkSession, question: Question, *, limit: int, folder: str | None) -> dict[str, Any]:
    """Compare, and give the report; all differences go below the folder, if there is one."""
    with ends(spark, question) as found:
        check_keys(found, question)
        both = joined(found, question).persist(StorageLevel.MEMORY_AND_DISK)
        different = differences(found, question, both).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            counts = {row["kind"]: row["count"] for row in different.groupBy("kind").count().collect()}
            days = [_plain(row.asDict()) for row in sums_by_day(both).collect()]
            first = _first(different, [kind for kind in KINDS if kind in counts], limit)
            check_days(found, question)
            if folder is not None:
                different.write.mode("overwrite").partitionBy("kind").parquet(f"{folder.rstrip('/')}/differences")
        finally:
            different.unpersist()
            both.unpersist()
    kinds = [kind for kind in KINDS if question.consumer is not None or kind not in {"missing", "lost"}]
    return {
        "moment": found.moment.isoformat(),
        "kept_from": str(found.kept_from),
        "differences": {kind: counts.get(kind, 0) for kind in kinds},
        "first": first,
        "days": days,
    }


def _first(different: DataFrame, kinds: Sequence[str], limit: int) -> dict[str, list[dict[str, Any]]]:
    named = {}
    for kind in kinds:
        rows = different.where(f.col("kind") == kind).drop("kind").orderBy("key", "message_id").limit(limit).collect()
        named[kind] = [
            {name: value for name, value in _plain(row.asDict()).items() if value is not None} for row in rows
        ]
    return named


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in row.items()}


def _value(value: object) -> object:
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"  # Spark gives the driver's time, and no zone
    return value if value is None or isinstance(value, int) else str(value)


def _print_text(report: dict[str, Any]) -> None:
    print(f"as of {report['moment']}; what was sent is known from {report['kept_from']} (UTC) on\n")
    for kind, count in report["differences"].items():
        print(f"{kind:14} {count:>12,}  {KINDS[kind]}")
        for named in report["first"].get(kind, ()):
            print("    " + ", ".join(f"{name} {value}" for name, value in named.items()))
    days = report["days"]
    names = ("rows", "amount_of_rows", "events", "amount_of_events", "difference")
    shown = [each for each in days if each["rows"] != each["events"] or float(each["difference"])]
    print(f"\n{len(shown)} of {len(days)} days differ")
    if shown:
        print(f"{'day':10} " + " ".join(f"{name:>20}" for name in names))
    for each in shown:
        print(f"{each['day'] or 'unknown':10} " + " ".join(f"{each[name]:>20}" for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
