"""What Kubernetes is told to start is in the image, and the image starts what Spark on Kubernetes asks it for."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox_spark.jobs.archive import _parser
from relay.testing.servers.process import free_port
from tests.support.java import java_home

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "config" / "spark-entrypoint"
JOBS = ROOT / "spark" / "outbox_spark" / "jobs"
COPIED = "COPY config/spark-entrypoint /opt/spark/bin/spark-entrypoint\n"
LINKED = "&& ln -s lib/python3*/site-packages/outbox_spark/jobs lib/python3*/site-packages/relay/examples .\n"


def test_the_application_names_what_the_image_has() -> None:
    application = yaml.safe_load((ROOT / "config" / "spark-application.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    spec: dict[str, Any] = application["spec"]
    dockerfile = (ROOT / "Dockerfile").read_text()

    assert (application["apiVersion"], application["kind"]) == ("sparkoperator.k8s.io/v1beta2", "SparkApplication")
    assert spec["image"] == f"outbox-relay-spark:{project['version']}"
    assert f"\npyspark=={spec['sparkVersion']} " in (ROOT / "requirements" / "spark.txt").read_text()
    assert COPIED in dockerfile
    assert LINKED in dockerfile
    job = Path(spec["mainApplicationFile"].removeprefix("local://"))
    assert (str(job.parent), (JOBS / job.name).is_file()) == ("/opt/spark/jobs", True)
    path = _parser().parse_args(spec["arguments"]).path
    mounts = [spec[role]["volumeMounts"] for role in ("driver", "executor")]
    assert [mount["mountPath"] for mounted in mounts for mount in mounted] == [path, path]
    assert [each["name"] for each in spec["driver"]["env"]] == ["RELAY_DATABASE_URL"]


@pytest.mark.drills
def test_the_entry_point_starts_a_driver() -> None:
    """Started as Kubernetes starts a driver, the entry point runs the job with its arguments."""
    job = str(JOBS / "archive.py")

    done = _start("driver", "--conf", "spark.master=local[1]", job, "--help", SPARK_DRIVER_BIND_ADDRESS="127.0.0.1")

    assert done.returncode == 0, done.stderr
    assert "folder of the archive" in done.stdout


@pytest.mark.drills
def test_the_entry_point_starts_an_executor() -> None:
    """Started as Kubernetes starts an executor, the entry point passes on its id, its memory and its Java options."""
    nobody = f"127.0.0.1:{free_port()}"
    done = _start(
        "executor",
        SPARK_JAVA_OPT_0="-Dspark.driver.port=7078",
        SPARK_JAVA_OPT_1="-Dsaid=two words",
        SPARK_EXECUTOR_MEMORY="256m",
        SPARK_EXECUTOR_CORES="1",
        SPARK_EXECUTOR_ID="1",
        SPARK_APPLICATION_ID="spark-1",
        SPARK_EXECUTOR_POD_IP="127.0.0.1",
        SPARK_EXECUTOR_POD_NAME="executor-1",
        SPARK_RESOURCE_PROFILE_ID="0",
        SPARK_DRIVER_URL=f"spark://CoarseGrainedScheduler@{nobody}",
    )

    words = done.stdout + done.stderr
    assert done.returncode == 1
    assert "KubernetesExecutorBackend" in words
    assert f"Failed to connect to /{nobody}" in words, words


def _start(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        **variables,
    }
    command = [str(ENTRYPOINT), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=100)
