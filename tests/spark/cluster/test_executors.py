"""Tasks fail and executors die: each row and its event are written once, whichever way."""

import asyncio
import os
import signal
from urllib.parse import urlsplit

import aio_pika
import psycopg
import pytest

from relay.config.settings import Settings
from relay.testing.servers.process import wait_for
from tests.faults.evidence import drain
from tests.faults.load import relaying
from tests.spark.cluster.conftest import MakeStage
from tests.spark.cluster.driver import Driver
from tests.spark.cluster.outcome import BATCH, PARTITION, WAYS, WriteWay, assert_written_once
from tests.spark.frames import LOADING, one
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy
from tests.support.queues import declare_bound

pytestmark = [pytest.mark.drills, pytest.mark.timeout(100)]

Options = dict[str, str]
STAGES = pytest.mark.parametrize("stage", ["before loading", "loading", "loaded"])
# What the relay is to publish, in the order of each key.
TO_PUBLISH = "SELECT aggregate_id, array_agg(message_id ORDER BY id) FROM outbox.message GROUP BY 1"


@WAYS
@STAGES
def test_a_task_that_fails_twice_is_tried_a_third_time(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay, stage: str
) -> None:
    """A task fails twice at a stage; Spark's third attempt succeeds, and each row is written once."""
    failing = at_stage(stage, partition=way.partitions - 1, attempts=2, fails=True)

    driver.save({**options, **way.options}, failing.fault, way.partitions)
    driver.answer()

    assert_written_once(connection, way)


@WAYS
@STAGES
def test_the_task_of_an_executor_that_is_killed_is_tried_on_another(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay, stage: str
) -> None:
    """An executor is killed at a stage; its task runs on another one, and each row is written once."""
    held = at_stage(stage, partition=way.partitions - 1)
    driver.save({**options, **way.options}, held.fault, way.partitions)
    executor = held.wait_reached(driver)
    if stage == "loading":
        wait_for(lambda: one(connection, LOADING) >= 1, "rows are ingested", 120)

    os.kill(executor, signal.SIGKILL)
    driver.answer()

    assert_written_once(connection, way)


@WAYS
async def test_a_task_whose_network_is_cut_is_tried_again(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay
) -> None:
    """A task's connection to the database is cut; Spark tries the task again, and each row is written once."""
    port = urlsplit(options["url"]).port or 0
    async with FaultProxy("127.0.0.1", port, amqp=False) as proxy:
        held = at_stage("loading", partition=way.partitions - 1, ports=(port, proxy.port))
        driver.save({**options, **way.options}, held.fault, way.partitions)
        await asyncio.to_thread(held.wait_reached, driver)

        proxy.cut()
        held.go_on()
        await asyncio.to_thread(driver.answer)

    assert_written_once(connection, way)


def test_several_dataframes_outlive_an_executor(
    driver: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage
) -> None:
    """An executor is killed while several DataFrames are written; each row is written once, all in one batch."""
    held = at_stage("before loading")
    driver.save_several(options, held.fault)

    os.kill(held.wait_reached(driver), signal.SIGKILL)
    held.go_on()  # the events come of the same DataFrame
    driver.answer()

    assert_written_once(connection, BATCH)


@pytest.mark.parametrize("way", [BATCH, PARTITION], ids=str)
async def test_what_outlived_an_executor_is_published_once_in_order(
    driver: Driver,
    options: Options,
    connection: psycopg.Connection,
    at_stage: MakeStage,
    settings: Settings,
    broker_url: str,
    way: WriteWay,
) -> None:
    """An executor is killed while it loads; the relay publishes each event of the batch once, in order."""
    held = at_stage("loading", partition=way.partitions - 1)
    driver.save({**options, **way.options}, held.fault, way.partitions)
    os.kill(held.wait_reached(driver), signal.SIGKILL)
    driver.answer()
    expected: dict[str, object] = dict(connection.execute(TO_PUBLISH).fetchall())
    await _declare(broker_url)

    async with relaying(settings):
        await eventually(lambda: one(connection, "SELECT count(*) FROM outbox.message_pending") == 0, "all are sent")

    published: dict[str, list[object]] = {}
    for message in await drain(broker_url, ["invoices"]):
        published.setdefault((message.key or "").rpartition("/")[2], []).append(message.message_id)
    assert published == expected


async def _declare(broker_url: str) -> None:
    async with await aio_pika.connect(broker_url) as connection:
        await declare_bound(await connection.channel(), "invoices")
