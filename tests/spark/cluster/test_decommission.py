"""Executors and workers are decommissioned while a batch is written: each row is written once."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.testing.servers.process import wait_for
from tests.spark.cluster.conftest import MakeStage
from tests.spark.cluster.driver import Driver
from tests.spark.cluster.outcome import BATCH, PARTITION, WAYS, WriteWay, assert_written_once
from tests.spark.frames import LOADING, one
from tests.support.spark_cluster import HOSTS, SparkCluster

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]

Options = dict[str, str]
DECOMMISSION = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.log.level": "WARN",  # which tells of a decommissioned executor
}
FORCED = {"spark.executor.decommission.forceKillTimeout": "2s"}
DECOMMISSIONED = " decommissioned message"  # what the driver says of the executor that told it
BY_ITSELF = "Executor decommission: ", "Command exited with code 0"  # whether driver or master saw it first
KILLED = "Executor killed by driver."


@pytest.fixture(scope="module")
def driver(cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("spark") / "driver", cluster.master_url, **DECOMMISSION) as running:
        yield running


@WAYS
def test_a_decommissioned_executor_ends_its_task_and_goes(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay
) -> None:
    """An executor is decommissioned amid the write; it ends its task before it goes, and each row is written once."""
    held = at_stage("loading", partition=way.partitions - 1)
    gone, told = len(driver.happened("ExecutorRemoved")), driver.log().count(DECOMMISSIONED)
    driver.save({**options, **way.options}, held.fault, way.partitions)
    executor = held.wait_reached(driver)
    wait_for(lambda: one(connection, LOADING) >= 1, "rows are ingested", 60)

    os.kill(executor, signal.SIGPWR)
    wait_for(lambda: driver.log().count(DECOMMISSIONED) > told, "the driver knows of it", 60)
    held.go_on()
    driver.answer()

    wait_for(lambda: len(driver.happened("ExecutorRemoved")) > gone, "the executor is gone", 60)
    assert driver.happened("ExecutorRemoved")[gone]["Removed Reason"].startswith(BY_ITSELF)
    assert_written_once(connection, way)


@pytest.mark.parametrize("way", [BATCH, PARTITION], ids=str)
def test_a_decommissioned_executor_that_is_too_slow_is_killed(
    cluster: SparkCluster,
    tmp_path: Path,
    options: Options,
    connection: psycopg.Connection,
    at_stage: MakeStage,
    way: WriteWay,
) -> None:
    """Spark kills a decommissioned executor amid its task, which runs again elsewhere; each row is written once."""
    held = at_stage("loading", partition=way.partitions - 1)
    with Driver(tmp_path / "driver", cluster.master_url, **DECOMMISSION, **FORCED) as driver:
        driver.save({**options, **way.options}, held.fault, way.partitions)
        executor = held.wait_reached(driver)
        wait_for(lambda: one(connection, LOADING) >= 1, "rows are ingested", 60)

        os.kill(executor, signal.SIGPWR)
        driver.answer()

        assert DECOMMISSIONED in driver.log()
        assert driver.happened("ExecutorRemoved")[0]["Removed Reason"] == KILLED
    assert_written_once(connection, way)


def test_an_executor_goes_with_its_decommissioned_worker(
    tmp_path: Path, options: Options, connection: psycopg.Connection, at_stage: MakeStage
) -> None:
    """A worker is decommissioned and its executor killed amid the write; another takes over, each row is there once."""
    held = at_stage("loading", partition=3)
    with SparkCluster() as cluster, Driver(tmp_path / "driver", cluster.master_url, **DECOMMISSION) as driver:
        driver.save({**options, **BATCH.options}, held.fault)
        executor = held.wait_reached(driver)
        wait_for(lambda: one(connection, LOADING) >= 1, "rows are ingested", 60)
        left = _host_of(executor)

        cluster.decommission(left)
        os.kill(executor, signal.SIGKILL)
        driver.answer()

        wait_for(lambda: len(driver.happened("TaskEnd")) >= 5, "Spark has noted the attempts", 60)
        done = {event["Task Info"]["Host"] for event in driver.happened("TaskEnd")[4:]}
        assert done == set(HOSTS) - {left}
    assert_written_once(connection, BATCH)


def _host_of(executor: int) -> str:
    given = Path(f"/proc/{executor}/cmdline").read_text().split("\0")
    return given[given.index("--hostname") + 1]
