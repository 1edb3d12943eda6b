"""config/compose.yaml brought up, on PostgreSQL 17 and RabbitMQ 4 of Debian in place of the images that it names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aio_pika
import pytest

from tests.container.debian import PASSWORD, build
from tests.container.podman import ROOT, Podman
from tests.container.run import Container
from tests.http.site import Site
from tests.support.eventually import eventually
from tests.support.process import ServerError, free_port, wait_for

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
        "POSTGRES_PASSWORD": PASSWORD,
        "RABBITMQ_PASSWORD": PASSWORD,
        "POSTGRES_PORT": str(free_port()),
        "RABBITMQ_PORT": str(free_port()),
        "METRICS_PORT": str(free_port()),
    }
    services = Composed(podman, environment)
    yield services
    services("down", "--volumes")


async def test_a_row_inserted_with_psql_arrives_in_a_queue(composed: Composed) -> None:
    # What `up` does by itself where podman runs health checks and heeds them: a podman without systemd does neither.
    composed("up", "--detach", "postgres", "rabbitmq")
    postgres, rabbitmq = composed.container("postgres"), composed.container("rabbitmq")
    for server in (postgres, rabbitmq):
        wait_for(server.is_healthy, f"{server.name} is healthy", 90)
    composed("run", "--rm", "--no-deps", "migrate")
    composed("run", "--detach", "--no-deps", "--service-ports", "--name=outbox-relay_relay_1", "relay")
    relay = composed.container("relay")
    relay.wait_for_log("relay.ready")
    broker = f"amqp://outbox:{PASSWORD}@127.0.0.1:{composed.environment['RABBITMQ_PORT']}/"
    async with await aio_pika.connect(broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("events", durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind("outbox", "#")

        insert = (
            "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
            """ VALUES ('customer', '17', 'InvoiceIssued', '{"invoice": 42}')"""
        )
        psql = ["psql", "--host=127.0.0.1", "--username=outbox", "--dbname=outbox", "--quiet", f"--command={insert}"]
        composed.podman.do("exec", f"--env=PGPASSWORD={PASSWORD}", postgres.name, *psql)
        await eventually(lambda: has_message(queue), "the row is in the queue")

        message = await queue.get(no_ack=True)
    assert message.routing_key == "customer.InvoiceIssued"
    assert message.body == b'{"invoice": 42}'
    assert relay.healthcheck().code == 0
    assert (await relay.site.get("/readyz")).body == "ok\n"
    await eventually(lambda: has_published(relay.site), "it is counted")
    assert relay.stop() == 0
    assert PASSWORD not in relay.log()


async def has_message(queue: aio_pika.abc.AbstractQueue) -> bool:
    return (await queue.declare()).message_count == 1


async def has_published(site: Site) -> bool:
    return await site.value("outbox_published_total") == 1
