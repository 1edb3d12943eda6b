"""Executors come and go while a batch is written, as the work asks for them: each row is written once."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.testing.servers.process import wait_for
from tests.spark.cluster.conftest import MakeStage
from tests.spark.cluster.driver import Driver
from tests.spark.cluster.outcome import BATCH, PARTITION, WriteWay, assert_written_once
from tests.spark.frames import LOADING, one
from tests.support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]

Options = dict[str, str]
ALLOCATION = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
    "spark.executor.cores": "1",
}
IDLE, KILLED = "Executor killed by driver.", "Command exited with code 137"


@pytest.fixture(scope="module")
def driver(cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("spark") / "driver", cluster.master_url, **ALLOCATION) as running:
        yield running


@pytest.fixture
def lone(cluster: SparkCluster, tmp_path: Path) -> Iterator[Driver]:
    """A driver with one executor at a time: with it goes all that was shuffled."""
    one_executor = {**ALLOCATION, "spark.dynamicAllocation.maxExecutors": "1"}
    with Driver(tmp_path / "lone", cluster.master_url, **one_executor) as running:
        yield running


@pytest.mark.parametrize("way", [BATCH, PARTITION], ids=str)
def test_an_idle_executor_goes_and_one_that_is_killed_is_replaced(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay
) -> None:
    """Spark takes an idle executor back amid the write, and a killed one is replaced; each row is written once."""
    held = at_stage("loading", partition=3)
    wait_for(lambda: not _there(driver), "those of the test before are gone", 60)
    gone_before = len(driver.happened("ExecutorRemoved"))
    driver.save({**options, **way.options}, held.fault)
    executor = held.wait_reached(driver)
    wait_for(lambda: len(driver.happened("ExecutorRemoved")) > gone_before, "an idle executor is gone", 60)
    wait_for(lambda: len(_there(driver)) == 1, "the one that is held is left", 60)
    wait_for(lambda: one(connection, LOADING) >= 1, "rows are ingested", 60)
    come_before = len(driver.happened("ExecutorAdded"))

    os.kill(executor, signal.SIGKILL)
    driver.answer()

    gone = [event["Removed Reason"] for event in driver.happened("ExecutorRemoved")[gone_before:]]
    assert gone[:2] == [IDLE, KILLED]
    assert len(driver.happened("ExecutorAdded")) > come_before
    assert_written_once(connection, way)


@pytest.mark.parametrize("way", [BATCH, PARTITION], ids=str)
def test_what_was_shuffled_is_lost_with_its_executor(
    lone: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay
) -> None:
    """The executor with all shuffled rows is killed amid the write; Spark shuffles again, each row is written once."""
    held = at_stage("loading", partition=2)
    lone.save({**options, **way.options}, held.fault, is_shuffled=True)
    executor = held.wait_reached(lone)
    wait_for(lambda: one(connection, LOADING) >= 1, "rows are ingested", 60)

    os.kill(executor, signal.SIGKILL)
    held.go_on()  # the stage begins again, and with it the count of attempts
    lone.answer()

    begun = [event["Stage Info"]["Stage Attempt ID"] for event in lone.happened("StageSubmitted")]
    assert begun == [0, 0, 1, 1]  # the shuffle and the write
    assert lone.happened("ExecutorRemoved")[0]["Removed Reason"] == KILLED
    assert_written_once(connection, way)


def _there(driver: Driver) -> set[str]:
    gone = {event["Executor ID"] for event in driver.happened("ExecutorRemoved")}
    return {event["Executor ID"] for event in driver.happened("ExecutorAdded")} - gone
