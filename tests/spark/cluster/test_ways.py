"""The package comes with the application, by `--py-files`, to executors that have pyarrow and the ADBC driver alone."""

from pathlib import Path

import psycopg
import pytest

from tests.spark.cluster.driver import Driver
from tests.spark.cluster.outcome import BATCH, WAYS, WriteWay, assert_written_once
from tests.spark.sent import add_sent

Options = dict[str, str]
LEFT_ALONE = [
    "ModuleNotFoundError: No module named 'outbox_spark'",
    "ModuleNotFoundError: No module named 'psycopg'",
]


@pytest.mark.jobs
@pytest.mark.timeout(300)
def test_executors_in_processes_of_their_own_write_a_batch(
    options: Options, connection: psycopg.Connection, tmp_path: Path
) -> None:
    with Driver(tmp_path / "driver", "local-cluster[2,1,1024]") as driver:
        driver.save({**options, **BATCH.options})
        driver.answer()

    assert_written_once(connection, BATCH)


@pytest.mark.drills
def test_the_package_comes_with_the_application_alone(driver: Driver) -> None:
    """Executors that have nothing installed get the package with the application, and nothing of the relay."""
    ((place, *alone),) = driver.do("executors")

    assert place == "./outbox_spark.zip/outbox_spark/__init__.py"
    assert alone == LEFT_ALONE


@pytest.mark.drills
@WAYS
def test_each_way_to_write(driver: Driver, options: Options, connection: psycopg.Connection, way: WriteWay) -> None:
    """On a cluster, each way to write a batch writes it once, and recognises the batch when it runs again."""
    for _ in range(2):  # written, and recognised
        driver.save({**options, **way.options}, partitions=way.partitions)
        driver.answer()

    assert_written_once(connection, way)


@pytest.mark.drills
def test_several_dataframes(driver: Driver, options: Options, connection: psycopg.Connection) -> None:
    """On a cluster, several DataFrames are written as one batch, each row once."""
    driver.save_several(options)
    driver.answer()

    assert_written_once(connection, BATCH)


@pytest.mark.drills
def test_sent_rows_are_read(driver: Driver, database_url: str, connection: psycopg.Connection) -> None:
    """On a cluster, executors read each sent row of the table."""
    add_sent(connection, "2026-11-01", 40)

    rows = driver.do("read", url=database_url)

    ids = connection.execute("SELECT aggregate_id, id FROM outbox.message ORDER BY id").fetchall()
    assert sorted(rows, key=lambda row: row[1]) == ids
