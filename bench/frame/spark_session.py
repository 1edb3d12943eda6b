"""What bench.spark needs of Java: a session, and PostgreSQL's JDBC driver for the reference."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from bench.frame.error import BenchmarkError
from relay.testing.servers.folders import temporary_folder
from tests.support.java import java_home

PACKAGE = "libpostgresql-jdbc-java"
INSTALLED = Path("/usr/share/java/postgresql.jar")
GIVEN = "POSTGRESQL_JDBC_JAR"


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """Hand over a session of two tasks at a time, so that it runs alike on every machine."""
    use_java()
    with _driver_jar() as jar, temporary_folder() as folder:
        settings = {
            "spark.jars": str(jar),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.driver.memory": "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(folder),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        }
        session = SparkSession.builder.master("local[2,3]").config(map=settings).getOrCreate()
        try:
            yield session
        finally:
            session.stop()


def use_java() -> None:
    """Let Spark find Java and this Python.

    Raises:
        BenchmarkError: there is no Java that Spark runs on.
    """
    if (home := java_home()) is None:
        raise BenchmarkError("no Java 17-21 found; `tests/support/packages demo` installs one")
    os.environ.update(JAVA_HOME=str(home), PYSPARK_PYTHON=sys.executable)


def jdbc(url: str) -> tuple[str, dict[str, str]]:
    """Return the address of a database for JDBC, and the options to log in with."""
    login, _, place = url.removeprefix("postgresql://").rpartition("@")
    user, _, password = login.partition(":")
    return f"jdbc:postgresql://{place}", {"user": user, "password": password, "driver": "org.postgresql.Driver"}


@contextmanager
def _driver_jar() -> Iterator[Path]:
    """Hand over the driver's jar: named by the environment, installed, or taken out of Debian's package without root.

    Raises:
        BenchmarkError: it cannot be had; the message names the ways.
    """
    given = os.environ.get(GIVEN)
    if given:
        yield Path(given)
    elif INSTALLED.exists():
        yield INSTALLED
    else:
        with temporary_folder() as folder:
            yield _from_package(folder)


def _from_package(folder: Path) -> Path:
    remedy = f"as root `apt-get install {PACKAGE}`, or name the jar in {GIVEN}"
    if not shutil.which("apt-get"):
        raise BenchmarkError(f"PostgreSQL's JDBC driver is missing: {remedy}")
    for command in (["apt-get", "download", PACKAGE], ["sh", "-c", "dpkg-deb --extract *.deb ."]):
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise BenchmarkError(f"PostgreSQL's JDBC driver is missing ({done.stderr.strip()}): {remedy}")
    return (folder / INSTALLED.relative_to("/")).resolve()
