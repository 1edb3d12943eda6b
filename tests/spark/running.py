"""Jobs as their user runs them, and the same jobs in this process, which takes no second Java."""

import importlib
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / "examples" / "pipeline"
JOBS = ROOT / "spark" / "outbox_spark" / "jobs"


def run_job(job: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a job to its end."""
    command = [*job_command(job), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=job_environment())


def call_job(job: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a job in this process to its end. It may not come as far as Spark, except inside `call_job_on`."""
    main = importlib.import_module(module_of(job)).main
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, job_environment(), clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess([job, *arguments], code, out.getvalue(), err.getvalue())


def call_job_on(spark: SparkSession, job: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a job in this process on this session, which goes on as it was."""
    before = spark.conf.getAll
    try:
        with patch.object(SparkSession, "stop"):
            return call_job(job, *arguments)
    finally:
        spark.sparkContext.setJobGroup("", "")
        for name in spark.conf.getAll.keys() - before.keys():
            spark.conf.unset(name)


def job_command(job: str) -> list[str]:
    return [sys.executable, str(file_of(job))]


def file_of(job: str) -> Path:
    """Return the file of a job: of the package, or of the example."""
    return next(file for folder in (JOBS, PIPELINE) if (file := folder / job).is_file())


def module_of(job: str) -> str:
    """Return the name under which a job is imported: an example is found by its folder, as by spark-submit."""
    name = Path(job).stem
    return f"outbox_spark.jobs.{name}" if file_of(job).parent == JOBS else name


def job_environment() -> dict[str, str]:
    """Return its own paths alone: what a job needs besides, its user has to have, too."""
    environment = {name: value for name, value in os.environ.items() if name != "RELAY_DATABASE_URL"}
    settings = "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2"
    return environment | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": "",
        "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell",
    }


def refused(job: str, code: int, words: str, *arguments: str) -> None:
    """Call a job that ends with this exit code, and these words in its last line."""
    check_refused(call_job(job, *arguments), code, words)


def check_refused(done: "subprocess.CompletedProcess[str]", code: int, words: str) -> None:
    job = Path(next(word for word in done.args if word.endswith(".py"))).name
    program = f"outbox-spark {Path(job).stem}" if file_of(job).parent == JOBS else job
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{program}: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert "opensesame" not in done.stderr  # the password of these tests
