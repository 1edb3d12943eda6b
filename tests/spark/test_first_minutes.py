"""What a data engineer meets first: the workers' Python, the jobs, the zip, the version of a batch."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from zipfile import ZipFile

import pytest

import outbox_spark
from outbox_spark.jobs.__main__ import JOBS, main
from tests.spark.releases import with_sources
from tests.spark.running import file_of

ROOT = Path(__file__).resolve().parents[2]
WRITE = """
import sys
from pyspark.sql import SparkSession
import outbox_spark
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
spark = builder.getOrCreate()
outbox_spark.register(spark)
try:
    spark.range(1).write.format("outbox").mode("append").options(url="postgresql://u@127.0.0.1:1/d", dbtable="t",
        aggregateType="a", aggregateIdColumn="id", eventType="e").save()
except Exception as error:
    print(outbox_spark.reason(error))
"""


def run_python(*arguments: str, folder: Path, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    """Run this Python with the package and without PYSPARK_PYTHON."""
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "spark"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYSPARK_PYTHON", None)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


@with_sources
def test_workers_get_the_python_that_registers_whatever_the_path_has(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text("#!/bin/sh\necho this Python has no outbox_spark >&2\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)

    told = run_python("-c", WRITE, folder=tmp_path, path=f"{tmp_path}:{os.environ['PATH']}")

    assert "port 1 failed: Connection refused" in told.stdout, told.stderr[-2000:]


def test_the_folder_of_the_jobs_and_the_zip_need_no_relay(tmp_path: Path) -> None:
    shown = run_python("-m", "outbox_spark.jobs", folder=tmp_path)
    zipped = run_python("-m", "outbox_spark.jobs", "--zip", "outbox_spark.zip", folder=tmp_path)
    refused = run_python("-m", "outbox_spark.jobs", "--zip", "no/outbox_spark.zip", folder=tmp_path)

    assert {f"{job}.py" for job in JOBS} < {file.name for file in Path(shown.stdout.strip()).iterdir()}
    assert zipped.returncode == 0
    with ZipFile(tmp_path / "outbox_spark.zip") as package:
        assert {"outbox_spark/__init__.py", "outbox_spark/jobs/archive.py"} <= set(package.namelist())
    assert refused.returncode == 2
    assert refused.stderr.endswith("no/outbox_spark.zip cannot be written: No such file or directory\n")


@pytest.mark.parametrize("job", JOBS)
def test_each_job_runs_by_its_name_and_as_a_file(job: str, tmp_path: Path) -> None:
    by_name = run_python("-m", "outbox_spark.jobs", job, "--help", folder=tmp_path)
    as_file = run_python(str(file_of(f"{job}.py")), "--help", folder=tmp_path)
    unknown = run_python("-m", "outbox_spark.jobs", f"{job}s", folder=tmp_path)

    assert (by_name.returncode, as_file.returncode, unknown.returncode) == (0, 0, 2)
    assert by_name.stdout == as_file.stdout
    assert by_name.stdout.startswith(f"usage: outbox-spark {job} [-h]")
    assert unknown.stderr.endswith(f"outbox-spark: error: unrecognized arguments: {job}s\n")


def test_the_command_of_the_wheel_is_that_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    assert EntryPoint("outbox-spark", scripts["outbox-spark"], "console_scripts").load() is main


@pytest.mark.parametrize("version", ["x", "2026-11-21", 1.5, -1, 2**63, True])
def test_a_version_that_is_no_number_is_refused_before_the_database_is_asked(version: object) -> None:
    with pytest.raises(outbox_spark.OptionError, match="version takes a whole number from 0 to"):
        outbox_spark.committed("postgresql://u@127.0.0.1:1/d", "nightly", version)  # type: ignore[arg-type]
