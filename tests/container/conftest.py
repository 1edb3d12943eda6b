"""The project's images, built once a run, and containers of them."""

import os
import secrets
from collections.abc import Iterator

import pytest

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.container.debian import postgres_container, rabbitmq_container
from tests.container.podman import Podman, missing, private_podman
from tests.container.run import RelayImage
from tests.support.releases import NEWEST


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    """A podman with the base image."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a base image and run containers of it here")
    if lacking := missing():
        pytest.skip(f"{', '.join(lacking)} not installed; on Debian `tests/support/packages test` installs it")
    with private_podman() as engine:
        engine.make_base()
        yield engine


@pytest.fixture(scope="session")
def image(podman: Podman) -> str:
    """The image of the relay."""
    podman.build("relay")
    return "outbox-relay"


@pytest.fixture(scope="session", params=["private", "debian"])
def servers(request: pytest.FixtureRequest) -> str:
    """The PostgreSQL and RabbitMQ for the relay's containers: the usual ones of the tests, or those of debian.py."""
    return str(request.param)


@pytest.fixture(scope="session")
def postgres(servers: str, request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    if servers == "private":
        yield request.getfixturevalue("postgres_of")(NEWEST)
    else:
        with postgres_container(request.getfixturevalue("podman")) as server:
            yield server


@pytest.fixture(scope="session")
def rabbitmq(servers: str, request: pytest.FixtureRequest) -> Iterator[RabbitServer]:
    if servers == "private":
        with RabbitServer(schedulers=1) as node:
            yield node
    else:
        with rabbitmq_container(request.getfixturevalue("podman")) as node:
            yield node


@pytest.fixture
def empty_database_url(postgres: PostgresServer) -> Iterator[str]:
    """A database without tables."""
    name = f"test_{secrets.token_hex(6)}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


@pytest.fixture
def relay(podman: Podman, image: str, empty_database_url: str, broker_url: str) -> Iterator[RelayImage]:
    """Containers of the relay, on an empty database and a virtual host for this test."""
    containers = RelayImage(podman, image, RELAY_DATABASE_URL=empty_database_url, RELAY_BROKER_URL=broker_url)
    yield containers
    containers.remove()
