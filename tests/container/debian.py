"""PostgreSQL 17 and RabbitMQ 4 in images of Debian trixie, in place of the usual images, which cannot be pulled."""

import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relay.testing.servers.process import free_port, wait_for
from tests.container.podman import BASE, Podman
from tests.support.given import GivenPostgres, GivenRabbit

PASSWORD = "opensesame"


def build(podman: Podman, server: str) -> str:
    """Build the image of `postgres` or `rabbitmq`, and return its name."""
    name = f"debian-{server}"
    options = ["--isolation=chroot", "--layers=false", "--format=docker", f"--build-arg=BASE={BASE}"]
    podman.run(
        ["podman", "build", *options, f"--target={server}", f"--tag={name}", Path(__file__).with_name("servers")]
    )
    return name


@contextmanager
def postgres_container(podman: Podman) -> Iterator[GivenPostgres]:
    """Run a PostgreSQL for tests."""
    image, port = build(podman, "postgres"), free_port()
    variables = [f"--env=POSTGRES_{name}" for name in ("USER=postgres", f"PASSWORD={PASSWORD}", "DB=postgres")]
    fleeting = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=200", "-c", "timezone=UTC"]
    with _running(podman, *variables, f"--publish=127.0.0.1:{port}:5432", "--shm-size=256m", image, *fleeting):
        server = GivenPostgres(f"postgresql://postgres:{PASSWORD}@127.0.0.1:{port}/postgres")
        with server:
            wait_for(server.is_ready, "PostgreSQL in a container", 60)
            yield server


@contextmanager
def rabbitmq_container(podman: Podman) -> Iterator[GivenRabbit]:
    """Run a RabbitMQ for tests."""
    image, port = build(podman, "rabbitmq"), free_port()
    variables = [f"--env=RABBITMQ_DEFAULT_{name}" for name in ("USER=relay", f"PASS={PASSWORD}")]
    with _running(podman, *variables, f"--publish=127.0.0.1:{port}:5672", image) as name:
        wait_for(lambda: podman("exec", name, "rabbitmqctl", "await_startup").code == 0, "RabbitMQ in a container", 90)
        shell = shlex.join([*podman.command, "exec", "--interactive", name])
        with GivenRabbit(f"amqp://relay:{PASSWORD}@127.0.0.1:{port}/", shell) as server:
            yield server


@contextmanager
def _running(podman: Podman, *arguments: str) -> Iterator[str]:
    name = f"server-{secrets.token_hex(4)}"
    podman.do("run", "--detach", f"--name={name}", *arguments)
    try:
        yield name
    finally:
        podman.do("rm", "--force", "--time=0", "--volumes", name)
