"""A cluster for the drills: started when the first of them asks, one a run, whole before each."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.engine.conftest import channel, outbox, queue, run_node, writer
from tests.support.cluster import Cluster, why_not

__all__ = ["channel", "outbox", "queue", "run_node", "writer"]  # the engine's fixtures, for drills in one process


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no cluster: {reason}")
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
async def cluster(running_cluster: Cluster) -> AsyncIterator[Cluster]:
    """Three nodes that see each other; faults are undone after the test."""
    await running_cluster.heal()
    yield running_cluster
    await running_cluster.heal()
