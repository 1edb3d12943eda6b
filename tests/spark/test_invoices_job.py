"""examples/pipeline/invoices.py as its user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from relay.testing.servers.process import free_port
from tests.spark.frames import one
from tests.spark.running import call_job, call_job_on, job_environment, refused

JOB = "invoices.py"

GOOD_AND_BAD = (
    " customer_id  date number_of_cds  dollar_value\r\n"
    " 00001 19970101  1   11.77\r\n"
    " 00002 19970112  1   12.00\r\n"
    " this is no purchase\r\n"
    " 00002 19970112  5   77.00\r\n"
    " 00003 19971301  2   20.76\r\n"
)


@pytest.mark.jobs
def test_the_job_writes_a_file_once_and_puts_the_bad_lines_aside(
    spark: SparkSession, database_url: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    file = tmp_path / "purchases.txt"
    file.write_text(GOOD_AND_BAD)
    arguments = ["--input", str(file), "--url", database_url, "--app-id", "cdnow", "--version", "1"]
    # What stands in the way of the first run: an invoice of the same purchase.
    connection.execute("INSERT INTO billing.invoice VALUES ('00002-19970112-2', '00002', '1997-01-12', 5, 77)")

    failed = call_job_on(spark, JOB, *arguments)

    assert failed.returncode == 1
    words = failed.stderr.splitlines()[-1]
    assert "nothing of the batch was written: duplicate key value" in words
    assert "Key (invoice_id)=(00002-19970112-2) already exists" in words
    assert one(connection, "SELECT count(*) FROM outbox.message") == 0

    connection.execute("DELETE FROM billing.invoice")
    written = call_job_on(spark, JOB, *arguments)

    summary = json.loads(written.stdout.splitlines()[-1])
    expected = {"recognised": False, "lines": 6, "headers": 1, "blank": 0, "purchases": 3, "quarantined": 2}
    assert {name: summary[name] for name in expected} == expected
    assert (summary["invoices"], summary["outbox_rows"]) == (3, 3)
    bad_lines = connection.execute("SELECT line_number, reason, line FROM billing.quarantine ORDER BY 1").fetchall()
    assert bad_lines == [
        (4, "customer id is no number", " this is no purchase"),
        (6, "date is no day written YYYYMMDD", " 00003 19971301  2   20.76"),
    ]
    events = connection.execute("SELECT aggregate_id, payload->>'amount' FROM outbox.message ORDER BY id").fetchall()
    assert sorted(events) == [("00001", "11.77"), ("00002", "12.00"), ("00002", "77.00")]
    assert [amount for customer, amount in events if customer == "00002"] == ["12.00", "77.00"]

    again = call_job(JOB, *arguments)

    assert "is in the ledger already: nothing is written" in again.stderr
    assert json.loads(again.stdout) == {
        "app_id": "cdnow",
        "version": 1,
        "recognised": True,
        "quarantined": 2,
        "invoices": 3,
        "outbox_rows": 3,
    }
    assert one(connection, "SELECT count(*) FROM outbox.message") == 3
    assert one(connection, "SELECT row_counts->'repeats' FROM outbox.batch") == 1


def test_a_file_of_another_shape_is_refused_and_writes_nothing(
    spark: SparkSession, database_url: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    file = tmp_path / "flights.csv"
    file.write_text("year,month,day\n2013,1,1\n")

    done = call_job_on(spark, JOB, "--input", str(file), "--url", database_url)

    assert done.returncode == 1
    words = done.stderr.splitlines()[-1]
    assert "flights.csv has no purchase in its 2 lines (line 1 has not four fields); nothing was written" in words
    assert one(connection, "SELECT count(*) FROM billing.quarantine") == 0


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_text("x")
    url = "postgresql://postgres:opensesame@127.0.0.1:1/nowhere"

    refused(JOB, 2, f"there is no file {tmp_path}/none.txt", "--input", f"{tmp_path}/none.txt", "--url", url)
    refused(JOB, 2, "give the database with --url or in RELAY_DATABASE_URL", "--input", str(file))
    refused(JOB, 2, "the database URL cannot be read", "--input", str(file), "--url", "postgresql://a:opensesame@[/b")
    refused(JOB, 2, "give both or neither", "--input", str(file), "--url", url, "--app-id", "a")
    refused(JOB, 2, "takes a whole number, not 'x'", "--input", str(file), "--url", url, "--version", "x")
    refused(JOB, 2, "give --app-id and --version", "--input", str(tmp_path), "--url", url)
    refused(JOB, 2, "the following arguments are required: --input")


def test_a_database_that_does_not_serve_is_told_in_one_line(
    database_url: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    file, empty = tmp_path / "some.txt", tmp_path / "empty.txt"
    file.write_text("x")
    empty.touch()
    server, _, name = database_url.rpartition("/")
    wrong_password = f"postgresql://postgres:opensesame@{server.rpartition('@')[2]}/{name}"
    nobody = f"postgresql://postgres:opensesame@127.0.0.1:{free_port()}/{name}"

    refused(JOB, 1, "password authentication failed", "--input", str(file), "--url", wrong_password)
    refused(JOB, 1, "Connection refused", "--input", str(file), "--url", nobody)
    refused(
        JOB,
        1,
        "outbox.batch does not exist in database 'postgres'",
        "--input",
        str(file),
        "--url",
        f"{server}/postgres",
    )
    refused(JOB, 1, "empty.txt is empty; nothing was written", "--input", str(empty), "--url", database_url)


@pytest.mark.jobs
def test_a_jvm_that_ends_is_told_in_one_line() -> None:
    # As after an OutOfMemoryError, for example for a line of 200 MB.
    program = """if True:
        from outbox_spark.jobs.command import run, session

        def work():
            with session("ends") as spark:
                spark.sparkContext._gateway.proc.kill()
                spark.range(1).count()

        raise SystemExit(run("invoices.py", work))
    """
    command = [sys.executable, "-c", program]

    done = subprocess.run(command, check=False, capture_output=True, text=True, env=job_environment())

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("invoices.py: Spark's JVM has ended, and its last words are above.")


def test_help_tells_what_it_takes() -> None:
    shown = call_job(JOB, "--help")

    assert shown.returncode == 0
    assert [option in shown.stdout for option in ("--input", "--url", "--app-id", "--version")] == [True] * 4
    assert "customer, day as YYYYMMDD" in " ".join(shown.stdout.split())
