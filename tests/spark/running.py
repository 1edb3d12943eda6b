"""Jobs as their user runs them."""

import os
import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).resolve().parents[2] / "spark" / "jobs"


def run_job(job: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a job to its end."""
    return _run([*job_command(job), *arguments])


def submit_job(job: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a job by spark-submit, which brings both streams of the job to the first."""
    submit = str(Path(sys.executable).with_name("spark-submit"))
    return _run([submit, "--conf", "spark.ui.enabled=false", str(JOBS / job), *arguments])


def job_command(job: str) -> list[str]:
    return [sys.executable, str(JOBS / job)]


def job_environment() -> dict[str, str]:
    """Give its own paths alone: what a job needs beside them, its user has to have, too."""
    environment = {name: value for name, value in os.environ.items() if name != "RELAY_DATABASE_URL"}
    settings = "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2"
    return environment | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": "",
        "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell",
    }


def refused(job: str, code: int, words: str, *arguments: str) -> None:
    """Run a job that ends with this exit code, and these words in its last line."""
    done = run_job(job, *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{job}: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert "opensesame" not in done.stderr  # the password of these tests


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, check=False, capture_output=True, text=True, env=job_environment())
