"""What the jobs have in common on the command line: the session, the last line, the exit code."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any, NoReturn

import psycopg
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.connection import conninfo
from outbox_spark.errors import one_line

URL = "RELAY_DATABASE_URL"
SHUT_DOWN = "SparkContext was shut down"  # what Spark says, or py4j that nobody answers, as the JVM ends
ENDED = (
    "Spark's JVM has ended, and its last words are above. After an OutOfMemoryError look for a line in the input that "
    "is far too long, or give more with --driver-memory. Run the job again: a batch is written once"
)


class JobError(Exception):
    """The job cannot do its work; the message says why and what follows."""


def run(
    program: str, work: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], int | None] | None = None
) -> int:
    """Do the work and show its summary, as JSON in the last line or by `show`; tell in one line why it failed.

    Gives the exit code: 1 when it failed, else what `show` says, or 0.
    """
    try:
        summary = work()
    except (JobError, outbox_spark.OutboxWriteError, psycopg.Error) as error:
        return _fail(program, one_line(error))
    except (PySparkException, Py4JError) as error:
        has_ended = SHUT_DOWN in str(error)
        return _fail(program, ENDED if has_ended else outbox_spark.reason(error) or _first_words(error))
    except ConnectionError:  # of py4j; psycopg and Spark have their own errors
        return _fail(program, ENDED)
    return (show or print_json)(summary) or 0


def print_json(summary: dict[str, Any]) -> None:
    """Print a summary as one line."""
    print(json.dumps(summary))


@contextmanager
def session(name: str) -> Iterator[SparkSession]:
    """Yield Spark, under this name on its web page, with the format `outbox`."""
    # Workers at plan time take the environment's Python, whatever the builder says.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if SparkConf().get("spark.master", "local[*]") == "local[*]":
        builder = builder.master("local[*,3]")  # spark-submit's default never tries a task again
    spark = builder.getOrCreate()
    try:
        outbox_spark.register(spark)
        yield spark
    finally:
        spark.stop()


def add_database(parser: argparse.ArgumentParser) -> None:
    """Let a job take its database."""
    parser.add_argument("--url", default=os.environ.get(URL), help=f"libpq URL of the database; default ${URL}")
    parser.add_argument("--outbox-schema", default="outbox", help="schema of the outbox tables; default %(default)s")


def check_database(program: str, options: argparse.Namespace) -> None:
    """Refuse a database that cannot be (exit code 2)."""
    if not options.url:
        refuse(program, f"give the database with --url or in {URL}")
    try:
        conninfo(options.url)
    except outbox_spark.OptionError as error:
        refuse(program, str(error))


def whole_number(text: str) -> int:
    """Read a number of the command line."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a whole number, not {text!r}")
    return int(text)


def day(text: str) -> date:
    """Read a day of the command line."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a day such as 2026-11-21, not {text!r}") from None


def refuse(program: str, message: str) -> NoReturn:
    """End with exit code 2: the arguments cannot be."""
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(2)


def _first_words(error: Exception) -> str:
    """Take the line that says what it is out of Spark's message, which has the call stacks of two languages."""
    lines = str(error).splitlines() or [type(error).__name__]
    is_of_java = lines[0].startswith("An error occurred while calling") and len(lines) > 1
    return lines[1].removeprefix(": ") if is_of_java else lines[0]


def _fail(program: str, message: str) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return 1
