"""One standalone cluster a run, with a driver for each file, and stages at which a test holds a write."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.cluster.driver import Driver
from tests.spark.cluster.stage import HeldStage
from tests.support.spark_cluster import SparkCluster

MakeStage = Callable[..., HeldStage]


@pytest.fixture(scope="session")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster() as running:
        yield running


@pytest.fixture(scope="module")
def driver(cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("spark") / "driver", cluster.master_url) as running:
        yield running


@pytest.fixture
def at_stage(tmp_path: Path) -> Iterator[MakeStage]:
    """Return a function that makes stages. A process that still waits at one goes on after the test."""
    made: list[HeldStage] = []

    def make(name: str, **fault: Any) -> HeldStage:
        made.append(HeldStage(tmp_path / f"stage-{len(made)}", name, **fault))
        return made[-1]

    yield make
    for stage in made:
        stage.go_on()
