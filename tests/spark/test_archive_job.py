"""`outbox-spark archive` as its user runs it."""

import json
import signal
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from relay.testing.servers.process import Process, wait_for
from tests.spark.frames import one
from tests.spark.running import call_job, call_job_on, check_refused, job_command, job_environment, refused, run_job
from tests.spark.sent import add_sent

JOB = "archive.py"
NOTED = "SELECT array_agg(day::text ORDER BY day) FROM outbox.archived_day"


@pytest.mark.jobs
@pytest.mark.timeout(300)
def test_the_job_archives_what_is_due_and_recognises_it(
    database_url: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    add_sent(connection, "2026-11-01", 30)
    add_sent(connection, "2026-11-02", 20)

    done = run_job(JOB, "--path", str(tmp_path), "--url", database_url)
    again = call_job(JOB, "--path", str(tmp_path), "--url", database_url)

    told, recognised = json.loads(done.stdout), json.loads(again.stdout)
    assert (done.returncode, again.returncode) == (0, 0)
    assert [(day["day"], day["rows"]) for day in told["archived"]] == [("2026-11-01", 30), ("2026-11-02", 20)]
    assert (recognised["archived"], recognised["recognised"]) == ([], told["archived"])
    assert one(connection, NOTED) == ["2026-11-01", "2026-11-02"]


@pytest.mark.drills
@pytest.mark.timeout(300)
def test_a_driver_that_is_killed_while_it_writes_is_run_again(
    database_url: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    """The driver is killed while it writes an archive; the day is not noted, and a rerun archives all of it."""
    add_sent(connection, "2026-11-01", 50_000)
    arguments = ["--path", str(tmp_path / "archive"), "--url", database_url]
    job = Process([*job_command(JOB), *arguments], log=tmp_path / "log", environment=job_environment())
    wait_for((tmp_path / "archive" / "day=2026-11-01" / "_temporary").exists, "it writes", 120)
    job.stop(signal.SIGKILL)
    unnoted = one(connection, NOTED)

    done = run_job(JOB, *arguments)

    assert unnoted is None
    assert [day["rows"] for day in json.loads(done.stdout)["archived"]] == [50_000]


def test_arguments_that_cannot_be_are_refused(
    spark: SparkSession, database_url: str, connection: psycopg.Connection
) -> None:
    today = str(one(connection, "SELECT (now() AT TIME ZONE 'UTC')::date"))
    good = ["--path", "x", "--url", database_url]

    refused(JOB, 2, "takes a day such as 2026-11-21, not 'x'", *good, "--day", "x")
    refused(JOB, 2, "--again takes the days that it means", *good, "--again")
    check_refused(run_job(JOB, "--path", "x"), 2, "give the database with --url or in RELAY_DATABASE_URL")
    add_sent(connection, "2026-11-01", 1)
    nowhere = call_job_on(spark, JOB, "--path", "nosuch://bucket/outbox", "--url", database_url)
    check_refused(nowhere, 1, 'No FileSystem for scheme "nosuch"')
    refused(JOB, 1, f"nothing was written: {today}: not over yet, or the table does not keep it", *good, "--day", today)
