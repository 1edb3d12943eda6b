"""What drills run on: one cluster a run, healed before each drill; a disk to fill; the servers of a fleet."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import ServerError
from relay.testing.servers.rabbitmq import RabbitServer
from tests.chaos.fleet import FleetServers
from tests.engine.conftest import channel, outbox, queue, refused_by_broker, run_node, writer
from tests.faults.alarms import ALARMS, Alarm
from tests.support.cluster import Cluster, why_not
from tests.support.volume import small_volume

# The engine's fixtures, for drills in one process.
__all__ = ["channel", "outbox", "queue", "refused_by_broker", "run_node", "writer"]


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


@pytest.fixture
def volume(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system to fill, of 64 MB or what the test asks for."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(small_volume(getattr(request, "param", "64m")))
        except ServerError as error:
            pytest.skip(f"no small file system: {error}")
        yield place


@pytest.fixture
def servers(postgres: PostgresServer, rabbitmq: RabbitServer, database_url: str, broker_url: str) -> FleetServers:
    """The run's servers, for a drill of several relays."""
    return FleetServers(postgres, rabbitmq, database_url, broker_url)


@pytest.fixture(params=ALARMS)
async def alarm(request: pytest.FixtureRequest, rabbitmq: RabbitServer) -> AsyncIterator[Alarm]:
    """An alarm of the broker that is cleared after the test: other tests use the broker, too."""
    alarm = Alarm(rabbitmq, request.param)
    yield alarm
    await alarm.clear()
