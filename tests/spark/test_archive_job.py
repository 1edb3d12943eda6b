"""spark/jobs/archive.py as its user runs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.spark.frames import one
from tests.spark.sent import add_sent
from tests.support.process import Process, wait_for

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "spark" / "jobs" / "archive.py"
NOTED = "SELECT array_agg(day::text ORDER BY day) FROM outbox.archived_day"


@pytest.mark.timeout(300)
def test_the_job_archives_what_is_due_and_recognises_it(
    database_url: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    add_sent(connection, "2026-11-01", 30)
    add_sent(connection, "2026-11-02", 20)

    done = _run("--path", str(tmp_path), "--url", database_url)
    again = _run("--path", str(tmp_path), "--url", database_url)

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
    add_sent(connection, "2026-11-01", 50_000)
    arguments = ["--path", str(tmp_path / "archive"), "--url", database_url]
    job = Process([sys.executable, str(JOB), *arguments], log=tmp_path / "log", environment=_environment())
    wait_for((tmp_path / "archive" / "day=2026-11-01" / "_temporary").exists, "it writes", 120)
    job.stop(signal.SIGKILL)
    unnoted = one(connection, NOTED)

    done = _run(*arguments)

    assert unnoted is None
    assert [day["rows"] for day in json.loads(done.stdout)["archived"]] == [50_000]


def test_arguments_that_cannot_be_are_refused(database_url: str, connection: psycopg.Connection) -> None:
    today = str(one(connection, "SELECT (now() AT TIME ZONE 'UTC')::date"))
    good = ["--path", "x", "--url", database_url]

    _refused(2, "takes a day such as 2026-11-21, not 'x'", *good, "--day", "x")
    _refused(2, "--again takes the days that it means", *good, "--again")
    _refused(2, "give the database with --url or in RELAY_DATABASE_URL", "--path", "x")
    _refused(1, f"nothing was written: {today}: not over yet, or the table does not keep it", *good, "--day", today)


def _refused(code: int, words: str, *arguments: str) -> None:
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr.splitlines()[-1]


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(JOB), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=_environment())


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "RELAY_DATABASE_URL"}
    return {
        **environment,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false pyspark-shell",
    }
