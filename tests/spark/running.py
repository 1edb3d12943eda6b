"""Jobs as their user runs them."""

import os
import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).resolve().parents[2] / "spark" / "jobs"


def run_job(job: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a job to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "RELAY_DATABASE_URL"}
    # Its own paths alone: what a job needs beside them, its user has to have, too.
    environment |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": ""}
    settings = "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2"
    environment["PYSPARK_SUBMIT_ARGS"] = f"{settings} pyspark-shell"
    command = [sys.executable, str(JOBS / job), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def refused(job: str, code: int, words: str, *arguments: str) -> None:
    """Run a job that ends with this exit code, and these words in its last line."""
    done = run_job(job, *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
