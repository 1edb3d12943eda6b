"""A standalone Spark cluster: a master, and two workers on separate hosts, whose Python has only what executors need.

with SparkCluster() as cluster:
    ...  # `cluster.master_url` for spark.master; `cluster.environment()` for the driver
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pyspark

from relay.testing.servers.process import Process, free_port, is_listening, wait_for
from relay.testing.servers.server import PrivateServer
from tests.support.java import java_home

ROOT = Path(__file__).resolve().parents[2]
PYSPARK = Path(pyspark.__file__).parent
# What docs/clusters.md says that they need; PySpark comes with Spark to the executors.
OF_EXECUTORS = ("adbc_driver_manager", "adbc_driver_postgresql", "pyarrow", "typing_extensions")
OF_DRIVERS = (*OF_EXECUTORS, "psycopg", "psycopg_binary", "pyspark", "py4j", "pandas", "numpy", "dateutil", "pytz")
# Spark runs twins only on another host than the first attempt's; the kernel answers on all of 127.0.0.0/8.
HOSTS = ("127.0.0.1", "127.0.0.2")
# A JVM of a test lives for seconds: the second compiler and the parallel collector would not pay.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class SparkCluster(PrivateServer):
    """One master and two workers of two cores each. They have nothing of this checkout."""

    IN_ORDER = signal.SIGTERM

    def __init__(self) -> None:
        super().__init__(None)
        self._workers: list[Process] = []

    @property
    def master_url(self) -> str:
        return f"spark://{HOSTS[0]}:{self.port}"

    def start(self) -> None:
        self.port = self.port or free_port()
        self._process = self._daemon("master.Master", "--port", str(self.port), host=HOSTS[0])
        self._process.wait_until(lambda: is_listening(self.port), 60)
        for number, host in enumerate(HOSTS):
            work = self._folder / f"work-{number}"
            options = ["--cores", "2", "--memory", "2g", "--work-dir", str(work), self.master_url]
            self._workers.append(self._daemon("worker.Worker", *options, host=host))

    def decommission(self, host: str) -> None:
        """Decommission the worker of this host; return once the master has noted it, and sends it no executor more."""
        noted = re.compile(rf"Decommissioning worker \S+ on {re.escape(host)}:")
        log = self._folder / f"master.Master-{HOSTS[0]}.log"
        self._workers[HOSTS.index(host)].tell(signal.SIGPWR)
        wait_for(lambda: noted.search(log.read_text(errors="replace")) is not None, f"{host} is decommissioned", 60)

    def stop(self, how: signal.Signals | None = None) -> None:
        for worker in self._workers:
            worker.stop(how or self.IN_ORDER)
        self._workers = []
        super().stop(how)

    def _prepare(self, folder: Path) -> None:
        self._folder = folder
        self._python = python_with(folder / "python", OF_EXECUTORS)

    def _daemon(self, name: str, *arguments: str, host: str) -> Process:
        launch = [str(PYSPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
        return Process(
            [*launch, "--host", host, "--webui-port", "0", *arguments],
            log=self._folder / f"{name}-{host}.log",
            # A worker takes SIGPWR as the order to leave, and hands it on to its executors.
            environment={
                **environment(self._python, self._folder),
                "SPARK_WORKER_OPTS": "-Dspark.decommission.enabled=true",
            },
            folder=self._folder,
            name=name,
        )


def environment(python: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a Spark process with this `python3`, and without this checkout."""
    home = java_home()
    assert home is not None, "Spark needs a Java"
    spark_home = folder / "spark-home"  # where a `local-cluster` leaves its workers' folders: not in the package
    spark_home.mkdir(exist_ok=True)
    for part in PYSPARK.iterdir():
        if not (spark_home / part.name).exists():
            (spark_home / part.name).symlink_to(part)
    return {
        "PATH": os.pathsep.join([str(python.parent), os.defpath]),
        "JAVA_HOME": str(home),
        "JAVA_TOOL_OPTIONS": JAVA_OPTIONS,
        "SPARK_HOME": str(spark_home),
        "SPARK_LOCAL_DIRS": str(folder),
        "SPARK_LOCAL_IP": HOSTS[0],
        "PYSPARK_PYTHON": "python3",  # each host's own
    }


def python_with(folder: Path, names: Iterable[str]) -> Path:
    """Return a Python that has only these packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in names:
        found = find_spec(name)
        assert found is not None, name
        assert found.origin is not None, name
        origin = Path(found.origin)
        for place in [origin.parent, *origin.parent.parent.glob(f"{name}.libs")] if found.parent == name else [origin]:
            (packages / place.name).symlink_to(place)
    return folder / "bin" / "python3"


def package_zip(folder: Path) -> Path:
    """Return a zip of spark/outbox_spark for `--py-files`, made as docs/clusters.md says."""
    made = folder / "outbox_spark.zip"
    with ZipFile(made, "w") as archive:
        for file in sorted((ROOT / "spark" / "outbox_spark").rglob("*.py")):
            archive.write(file, file.relative_to(ROOT / "spark"))
    return made
