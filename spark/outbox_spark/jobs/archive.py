"""Write closed days of sent rows to Parquet, by day and event type, and compare them with the table.

    outbox-spark archive --path s3a://bucket/outbox --url postgresql://user@host/database

Without --day: every day that is over and not archived yet, the oldest first. A day that is archived is recognised. Run
it again after whatever ended it: what was under way is begun again.

The last line on stdout is JSON with the days. Exit code 0: all of them are archived; 1: failed, and the days before are
archived; 2: the arguments cannot be.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outbox_spark.archiving.archive import archive_day
from outbox_spark.archiving.ledger import ArchivedDay, archived_days, archiving, closed_days
from outbox_spark.connection import connect, conninfo
from outbox_spark.jobs.command import JobError, add_database, check_database, day, refuse, run, session

PROGRAM = "outbox-spark archive"
PARQUET = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # Spark's INT96 is deprecated
    "spark.sql.maxConcurrentOutputFileWriters": "16",  # of a task; its rows need no sort then
}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    check_database(PROGRAM, options)
    if options.again and not options.day:
        refuse(PROGRAM, "--again takes the days that it means: --day 2026-11-21")
    return run(PROGRAM, lambda: _archive(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Write closed days of sent rows to Parquet, and compare them with the table."
    )
    parser.add_argument("--path", required=True, help="folder of the archive; what Spark writes, or a local path")
    parser.add_argument("--day", action="append", type=day, help="may be repeated; default: all days that are due")
    parser.add_argument("--again", action="store_true", help="write these days again, also when they are archived")
    add_database(parser)
    return parser


def _archive(options: argparse.Namespace) -> dict[str, Any]:
    schema = options.outbox_schema
    with connect(conninfo(options.url)) as connection, archiving(connection, schema):
        closed, noted = closed_days(connection, schema), archived_days(connection, schema)
        wanted = sorted(set(options.day or closed))
        due = [each for each in wanted if options.again or each not in noted]
        if missing := [str(each) for each in due if each not in closed]:
            raise JobError(f"nothing was written: {', '.join(missing)}: not over yet, or the table does not keep it")
        done = []
        if due:
            with session(f"archive of {len(due)} days") as spark:
                for name, value in PARQUET.items():
                    spark.conf.set(name, value)
                for each in due:
                    spark.sparkContext.setJobGroup("archive", f"day {each}")
                    told = archive_day(spark, connection, each, options.path, url=options.url, outbox_schema=schema)
                    print(f"{PROGRAM}: {each}: {told.rows} rows are archived", file=sys.stderr)
                    done.append(told)
    recognised = [noted[each] for each in wanted if each not in due]
    return {"path": options.path, "archived": _plain(done), "recognised": _plain(recognised)}


def _plain(days: Sequence[ArchivedDay]) -> list[dict[str, Any]]:
    return [{**asdict(each), "day": str(each.day), "checksum": str(each.checksum)} for each in days]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
