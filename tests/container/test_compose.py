"""config/compose.yaml brought up, on PostgreSQL 17 and RabbitMQ 4 of Debian in place of the images that it names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aio_pika
import pytest

from relay.testing.servers.process import ServerError, free_port, wait_for
from tests.container.debian import PASSWORD, build
from tests.container.podman import ROOT, Podman
from tests.container.run import Container
from tests.http.site import Site
from tests.support.eventually import eventually

pytestmark = [pytest.mark.images, pytest.mark.timeout(900)]

COMPOSE = Path(sys.executable).with_name("podman-compose")


@dataclass(frozen=True, slots=True)
class Composed:
    """The services of the file under the names that podman-compose gives them."""

    podman: Podman
    environment: dict[str, str]

    def __call__(self, *arguments: str) -> None:
        """Run `podman-compose ...`, which must succeed."""
        command: list[str | Path] = [COMPOSE, "--file", ROOT / "config/compose.yaml", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise ServerError(f"podman-compose {arguments[0]} failed: {done.stdout}{done.stderr}")

    def container(self, service: str) -> Container:
        site = Site(f"127.0.0.1:{self.environment['METRICS_PORT']}")
        return Container(self.podman, f"outbox-relay_{service}_1", site)


@pytest.fixture
def composed(podman: Podman, image: str) -> Iterator[Composed]:
    images = {server: build(podman, server) for server in ("postgres", "rabbitmq")}
    environment = {
        **podman.environment,
        "PATH": f"{COMPOSE.parent}:{os.environ['PATH']}",
        "RELAY_IMAGE": f"localhost/{image}",
        "POSTGRES_IMAGE": f"localhost/{images['postgres']}",
        "RABBITMQ_IMAGE": f"localhost/{images['rabbitmq']}",
        **{f"{who}_PASSWORD": f"{PASSWORD}{who}" for who in ("POSTGRES", "OWNER", "RELAY", "RABBITMQ")},
        "POSTGRES_PORT": str(free_port()),
        "RABBITMQ_PORT": str(free_port()),
        "METRICS_PORT": str(free_port()),
    }
    services = Composed(podman, environment)
    yield services
    services("down", "--volumes")


async def test_a_row_inserted_with_psql_arrives_in_the_queue_of_the_example(composed: Composed) -> None:
    # Without systemd nobody runs podman's health checks, so nothing is waited for: each step is started until it works.
    composed("up", "--detach", "--no-deps")
    postgres, relay = composed.container("postgres"), composed.container("relay")
    wait_for(lambda: "relay.ready" in relay.log(), "the relay is ready", 240)
    insert = (
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
        """ VALUES ('customer', '17', 'InvoiceIssued', '{"invoice": 42}')"""
    )
    psql = ["psql", "--host=127.0.0.1", "--username=postgres", "--dbname=outbox", "--quiet", "--tuples-only"]
    login = f"--env=PGPASSWORD={PASSWORD}POSTGRES"
    broker = f"amqp://outbox:{PASSWORD}RABBITMQ@127.0.0.1:{composed.environment['RABBITMQ_PORT']}/"

    composed.podman.do("exec", login, postgres.name, *psql, f"--command={insert}")

    async with await aio_pika.connect(broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("events", durable=True, arguments={"x-queue-type": "quorum"})
        await eventually(lambda: has_message(queue), "the row is in the queue")
        message = await queue.get(no_ack=True)
    assert message.routing_key == "customer.InvoiceIssued"
    assert message.body == b'{"invoice": 42}'
    await eventually(lambda: has_published(relay.site), "it is counted")
    status = composed.podman("exec", relay.name, "relay", "status")
    assert (status.code, status.out.splitlines()[0]) == (0, "state\tok"), status.out
    assert relay.healthcheck().code == 0
    assert (await relay.site.get("/readyz")).body == "ok\n"
    logins = "SELECT DISTINCT usename FROM pg_stat_activity WHERE application_name LIKE 'outbox-relay%'"
    assert composed.podman.do("exec", login, postgres.name, *psql, f"--command={logins}").strip() == "relay"
    assert relay.stop() == 0
    assert PASSWORD not in relay.log()


async def has_message(queue: aio_pika.abc.AbstractQueue) -> bool:
    return (await queue.declare()).message_count == 1


async def has_published(site: Site) -> bool:
    return await site.value("outbox_published_total") == 1
