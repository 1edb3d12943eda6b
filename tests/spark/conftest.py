"""One Spark session a run, and for each test a database with the tables of billing."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark.spark_api import HAS_SOURCES
from tests.spark.one_row import billing_options
from tests.spark.releases import with_sources

# A JVM of a test lives for seconds: the second compiler and the parallel collector would not pay. A quarter less time.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
ROOT = Path(__file__).resolve().parents[2]
BILLING = (ROOT / "examples" / "pipeline" / "billing.sql").read_text()

# What uses the format itself.
OF_FORMAT = {"archive_job", "archiving", "connect", "daily", "invoices_job", "purchases", "reconcile_job", "replaying"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what Spark 3.5 cannot run, as it lacks the format."""
    for item in items:
        if item.path.stem.removeprefix("test_") in OF_FORMAT or item.path.parent.name == "cluster":
            item.add_marker(with_sources)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session that tries a task three times."""
    folder = tmp_path_factory.mktemp("spark")
    # Spark's Python workers: this Python, and the writers that fail on purpose.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "spark")])
    os.environ["SPARK_LOCAL_DIRS"] = str(folder)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"  # where the web page listens
    settings = {
        "spark.ui.port": "0",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "OFF",  # the failures are the tests' own
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "Asia/Kolkata",  # half an hour off: a lost zone is seen
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    session = SparkSession.builder.master("local[2,3]").config(map=settings).getOrCreate()
    if HAS_SOURCES:
        outbox_spark.register(session)
    yield session
    session.stop()


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    """A connection to the test's database, which has the tables of billing."""
    with psycopg.connect(database_url, autocommit=True) as connected:
        connected.execute(BILLING)
        yield connected


@pytest.fixture
def options(database_url: str, connection: psycopg.Connection) -> dict[str, str]:
    """Options of a good write, whose table is there."""
    return billing_options(database_url)
