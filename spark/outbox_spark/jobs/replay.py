"""Send archived days again, through the outbox: new pending rows with the message ids that they had.

    outbox-spark replay --day 2026-10-01 --event-type InvoiceIssued --url postgresql://user@host/database

A day that is not archived is read from the table, as long as it is kept. One transaction writes all rows, in the order
in which they were written at first. `relay jobs list` has each replay, with the number that is the `writer` of its
rows.

The last line on stdout is JSON with the counts. Exit code 0: written, or counted with --dry-run; 1: failed, nothing was
written; 2: the arguments cannot be.
"""

import argparse
import getpass
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from outbox_spark.archiving.replay import Wanted, rows_of, write_again
from outbox_spark.connection import connect, conninfo
from outbox_spark.jobs.command import add_database, check_database, day, run, session

PROGRAM = "outbox-spark replay"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    check_database(PROGRAM, options)
    return run(PROGRAM, lambda: _replay(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Send archived days again, through the outbox.")
    parser.add_argument("--day", action="append", type=day, required=True, help="a day of sending; may be repeated")
    parser.add_argument("--aggregate-type", help="rows of this type alone")
    parser.add_argument("--aggregate-id", help="rows of this key alone")
    parser.add_argument("--event-type", help="events of this type alone")
    parser.add_argument("--to-exchange", help="in place of the exchange that they had")
    parser.add_argument("--routing-key", help="in place of the routing key that they had")
    parser.add_argument("--rate", type=_rate, help="rows a second, at most; default: as fast as the relay sends")
    parser.add_argument("--by", default=os.environ.get("RELAY_OPERATOR"), help="who does it, for the audit")
    parser.add_argument("--dry-run", action="store_true", help="write nothing; tell the count by day and event type")
    add_database(parser)
    return parser


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0
    if not 0 < rate < 1_000_000:
        raise argparse.ArgumentTypeError(f"takes rows a second, above 0 and below 1000000, not {text!r}")
    return rate


def _replay(options: argparse.Namespace) -> dict[str, Any]:
    filters = ("aggregate_type", "aggregate_id", "event_type", "to_exchange", "routing_key", "rate")
    wanted = Wanted(days=sorted(set(options.day)), **{name: getattr(options, name) for name in filters})
    schema = options.outbox_schema
    with connect(conninfo(options.url)) as connection, session("replay") as spark:
        rows = rows_of(spark, connection, wanted, url=options.url, outbox_schema=schema)
        if options.dry_run:
            counts = rows.groupBy("event_type").count().orderBy("event_type").collect()
            return {"dry_run": True, "rows": {row.event_type: row["count"] for row in counts}}
        number, count = write_again(connection, rows, wanted, made_by=options.by or _operator(), outbox_schema=schema)
    return {"dry_run": False, "replay": number, "rows": count}


def _operator() -> str:
    """Name the system's user and host; in a container the user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
