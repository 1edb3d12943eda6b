"""Spark runs twins of slow tasks: of two attempts at a partition one counts, and a silent one holds nobody up."""

import asyncio
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

from relay.testing.servers.process import wait_for
from tests.spark.cluster.conftest import MakeStage
from tests.spark.cluster.driver import Driver
from tests.spark.cluster.outcome import BATCH, WAYS, WriteWay, assert_written_once, is_left_alone
from tests.spark.frames import LOADING, WAITING_FOR_LOCK, counts, one, staging_tables
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way
from tests.support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]

Options = dict[str, str]
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.task.duration.threshold": "2s",  # for a stage of one task, too
}


@pytest.fixture(scope="module")
def driver(cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("spark") / "driver", cluster.master_url, **SPECULATION) as running:
        yield running


@WAYS
def test_of_a_slow_task_and_its_twin_one_counts(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay
) -> None:
    """Spark starts a twin of a slow task; only one of the two counts, and each row is written once."""
    slow = at_stage("loading", partition=way.partitions - 1)
    driver.save({**options, **way.options}, slow.fault, way.partitions)
    slow.wait_reached(driver)

    if way is not BATCH:  # the slow one came first in the ledger: its twin waits for it, and finds the piece written
        wait_for(lambda: one(connection, WAITING_FOR_LOCK) == 1, "the twin waits", 120)
        slow.go_on()
    driver.answer()

    if way is BATCH:  # while the slow one is being killed it may hold the pattern of staging tables: a rerun drops it
        assert counts(connection) == (100, 100, way.ledger_rows)
        wait_for(lambda: is_left_alone(options["url"]), "the slow one has ended", 120)
        driver.save({**options, **way.options})
        driver.answer()
    assert_written_once(connection, way)


@pytest.mark.parametrize(("door", "tables"), [(Driver.save, 1), (Driver.save_several, 2)], ids=["save", "OutboxBatch"])
def test_of_two_attempts_that_have_staged_all_rows_one_counts(
    driver: Driver,
    options: Options,
    connection: psycopg.Connection,
    at_stage: MakeStage,
    door: Callable[..., None],
    tables: int,
) -> None:
    """A slow task and its speculative twin have both staged every row; one counts, and each row is written once."""
    connection.execute("ALTER TABLE billing.invoice DROP CONSTRAINT invoice_pkey")  # which would refuse the other's
    both = at_stage("loaded", partition=3, attempts=2)
    before = len(_twins(driver))

    door(driver, {**options, **BATCH.options}, both.fault)
    wait_for(lambda: _staged(connection) == [25] * 5 * tables, "both attempts have staged their rows", 120)
    both.go_on()
    driver.answer()

    wait_for(lambda: len(_twins(driver)) == before + 1, "Spark has noted the twin", 30)
    assert _twins(driver)[-1] == (3, 1)
    assert_written_once(connection, BATCH)


async def test_a_task_whose_network_goes_silent_is_left_to_its_twin(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage
) -> None:
    """The network of a task goes silent; its twin finishes the batch, and each row is written once."""
    port = urlsplit(options["url"]).port or 0
    async with FaultProxy("127.0.0.1", port, amqp=False) as proxy:
        silent = at_stage("loading", partition=3, ports=(port, proxy.port))
        driver.save({**options, **BATCH.options}, silent.fault)
        await asyncio.to_thread(silent.wait_reached, driver)
        await eventually(lambda: one(connection, LOADING) == 1, "rows are ingested")
        proxy.hold(Way.UP)
        proxy.hold(Way.DOWN)
        silent.go_on()

        await asyncio.to_thread(driver.answer)

        assert counts(connection) == (100, 100, 1)
        # The server still waits for the silent one, whose table goes with the next run of the batch, or by age.
        proxy.cut()
        await eventually(lambda: is_left_alone(options["url"]), "its session has ended")
    driver.save({**options, **BATCH.options})
    driver.answer()
    assert_written_once(connection, BATCH)


def _twins(driver: Driver) -> list[tuple[int, int]]:
    """Return partition and number of the attempts that Spark calls speculative."""
    begun = [event["Task Info"] for event in driver.happened("TaskStart")]
    return [(task["Partition ID"], task["Attempt"]) for task in begun if task["Speculative"]]


def _staged(connection: psycopg.Connection) -> list[int]:
    """Return the numbers of rows in staging tables that are committed, but for the empty patterns."""
    rows = [one(connection, f"SELECT count(*) FROM outbox.{table}") for table in staging_tables(connection)]
    return [number for number in rows if number]
