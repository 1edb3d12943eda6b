"""A driver dies at a stage of its batch, or two are at one batch: it is there once, at the latest after a rerun."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.testing.servers.process import wait_for
from tests.spark.cluster.conftest import MakeStage
from tests.spark.cluster.driver import Driver
from tests.spark.cluster.outcome import (
    BATCH,
    PARTITION,
    SINGLE_TASK,
    WAYS,
    WriteWay,
    assert_nothing_written,
    assert_written_once,
    is_left_alone,
)
from tests.spark.frames import one
from tests.support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.drills, pytest.mark.timeout(600)]

Options = dict[str, str]
PIECES = "SELECT count(*) FROM outbox.batch WHERE partition >= 0"


@pytest.fixture
def other(cluster: SparkCluster, tmp_path: Path) -> Iterator[Driver]:
    """A driver for one test, which may kill it."""
    with Driver(tmp_path / "other", cluster.master_url) as running:
        yield running


@pytest.mark.parametrize(
    ("way", "stage", "pieces"),
    [
        pytest.param(BATCH, "before loading", 0, id="batch-before-staging"),
        pytest.param(BATCH, "committing", 0, id="batch-between-staging-and-commit"),
        pytest.param(BATCH, "committed", 100, id="batch-before-its-answer"),
        pytest.param(PARTITION, "loading", 3, id="partition-with-one-piece-under-way"),
        pytest.param(PARTITION, "committing", 4, id="partition-before-the-batch-is-entered"),
        pytest.param(SINGLE_TASK, "loading", 0, id="single-task-under-way"),
    ],
)
def test_the_batch_of_a_driver_that_is_killed_runs_again(
    driver: Driver,
    other: Driver,
    options: Options,
    connection: psycopg.Connection,
    at_stage: MakeStage,
    way: WriteWay,
    stage: str,
    pieces: int,
) -> None:
    """A driver is killed at a stage of its batch; a rerun of the batch writes each row once."""
    held = at_stage(stage, partition=way.partitions - 1)
    other.save({**options, **way.options}, held.fault, way.partitions)
    held.wait_reached(other)
    if way is PARTITION:
        wait_for(lambda: one(connection, PIECES) == pieces, "the other pieces are written", 60)

    other.kill()
    # Its executors notice that they are alone, and end; their sessions with them.
    wait_for(lambda: is_left_alone(options["url"]), "nobody is at the batch any more", 60)

    if stage == "committed":
        assert_written_once(connection, way)
    elif way is PARTITION:
        assert one(connection, "SELECT count(*) FROM billing.invoice") == 25 * pieces
    else:
        assert_nothing_written(connection)
    driver.save({**options, **way.options}, partitions=way.partitions)
    driver.answer()
    assert_written_once(connection, way)


@WAYS
def test_two_drivers_at_one_batch_write_it_once(
    driver: Driver, other: Driver, options: Options, connection: psycopg.Connection, at_stage: MakeStage, way: WriteWay
) -> None:
    """Two drivers run the same batch at once; each row is written once, and both drivers succeed."""
    stage = "committing" if way is BATCH else "before loading"
    both = {each: at_stage(stage, partition=way.partitions - 1) for each in (driver, other)}
    for each, held in both.items():
        each.save({**options, **way.options}, held.fault, way.partitions)
    for each, held in both.items():
        held.wait_reached(each)

    for held in both.values():
        held.go_on()
    for each in both:
        each.answer()

    assert_written_once(connection, way)
