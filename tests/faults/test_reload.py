"""SIGHUP moves a running relay to other hosts of the broker, by its file or by DNS, and never ends it."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractQueue
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import Settings
from relay.engine.reload import reloading
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.cli.command import RELAY, Command
from tests.engine.conftest import Outbox, Reader
from tests.faults.evidence import drain
from tests.faults.hosts import two_hosts
from tests.faults.load import under_load
from tests.faults.victim import Victim
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy
from tests.support.queues import declare_bound

NAME = "rabbit.test"

Configure = Callable[..., None]


class ReloadableRelay(Victim):
    """`relay run` with a file that `configure` writes."""

    def reload(self) -> None:
        os.kill(self.pid, signal.SIGHUP)

    def events(self, *names: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.log.read_text().splitlines())
        return [line for line in lines if line["event"] in names]

    async def tells(self, name: str) -> dict[str, Any]:
        """Wait for an event of this name, and return it."""
        await eventually(lambda: bool(self.events(name)), name)
        return self.events(name)[-1]


@pytest.fixture
def configure(tmp_path: Path, settings: Settings) -> Configure:
    """`configure(url, max_in_flight=7)` writes the file that the relay reads."""

    def write(url: object, **keys: int) -> None:
        lines = [
            f'broker.url = "{url}"',
            f'database.url = "{settings.database.url.get_secret_value()}"',
            *(f"relay.{key} = {value}" for key, value in keys.items()),
        ]
        (tmp_path / "relay.toml").write_text("\n".join(lines))

    return write


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[ReloadableRelay]:
    variables = {"RELAY_CONFIG": str(tmp_path / "relay.toml"), "RELAY_LOG_FORMAT": "json"}
    relay = ReloadableRelay("relay", [RELAY, "run"], Command(tmp_path).environment(variables), "relay.ready", tmp_path)
    yield relay
    relay.stop(signal.SIGKILL)


async def test_the_hosts_of_the_file_are_taken_over_and_other_keys_are_named(
    relay: ReloadableRelay, configure: Configure, settings: Settings, outbox: Outbox, queue: Reader
) -> None:
    """SIGHUP brings other hosts and another key; the relay moves, and names the key that needs a restart."""
    url = URL(settings.broker.url.get_secret_value())
    async with two_hosts(settings) as (first, second):
        configure(url.with_port(first.port))
        await relay.start()

        configure(f"{url.with_port(second.port)},amqp://other/", max_in_flight=7)
        relay.reload()

        told = await relay.tells("configuration.reloaded")
        assert told["hosts"] == [f"127.0.0.1:{second.port}", "other:5672"]
        assert told["needs_restart"] == ["relay.max_in_flight"]
        await eventually(lambda: (first.connections, second.connections) == (0, 1), "it goes over")
        id_ = await outbox.insert()
        assert await queue.ids(1) == [id_]

    assert str(url.password) not in relay.log.read_text()
    assert relay.stop(signal.SIGTERM) == 0


async def test_a_configuration_that_cannot_be_used_is_refused_and_the_old_hosts_stay(
    relay: ReloadableRelay, configure: Configure, settings: Settings, outbox: Outbox, queue: Reader
) -> None:
    """SIGHUP brings an invalid file; the relay names each error without the password, and keeps its hosts."""
    configure(settings.broker.url.get_secret_value())
    await relay.start()

    configure("http://relay:hunter2@broker/", max_in_flight=0)
    relay.reload()

    told = await relay.tells("configuration.refused")
    assert "broker.url" in told["reason"]
    assert "relay.max_in_flight" in told["reason"]
    assert "hunter2" not in relay.log.read_text()
    id_ = await outbox.insert()
    assert await queue.ids(1) == [id_]
    assert relay.stop(signal.SIGTERM) == 0


async def test_a_fault_of_the_reader_does_not_end_the_reloading(settings: Settings) -> None:
    """SIGHUP meets a fault that nobody has foreseen; the next SIGHUP is obeyed."""
    loads: list[Settings] = []
    is_used = asyncio.Event()

    def load() -> Settings:
        loads.append(settings)
        if len(loads) == 1:
            raise ZeroDivisionError
        return settings

    async def use_hosts(_: SecretStr) -> None:
        is_used.set()

    async with reloading(load, settings, use_hosts):
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: len(loads) == 1, "it is read once")
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(is_used.wait(), 60)


async def test_a_secret_file_is_read_again(
    relay: ReloadableRelay, configure: Configure, settings: Settings, tmp_path: Path, outbox: Outbox, queue: Reader
) -> None:
    """The file with the broker's URL changes; SIGHUP moves the relay to the new host."""
    configure("amqp://nobody/")
    url, secret = URL(settings.broker.url.get_secret_value()), tmp_path / "url"
    relay.environment = {**relay.environment, "RELAY_BROKER_URL_FILE": str(secret)}
    async with two_hosts(settings) as (first, second):
        secret.write_text(f"{url.with_port(first.port)}\n")
        await relay.start()

        secret.write_text(f"{url.with_port(second.port)}\n")
        relay.reload()

        await eventually(lambda: (first.connections, second.connections) == (0, 1), "it goes over")


async def test_while_it_waits_for_its_broker_at_the_start_it_takes_the_hosts_over_too(
    relay: ReloadableRelay, configure: Configure, settings: Settings, outbox: Outbox, queue: Reader
) -> None:
    """The relay waits for its first broker; SIGHUP brings a reachable host, and the relay becomes ready."""
    relay.ready = "broker.degraded"
    configure(f"amqp://127.0.0.1:{free_port()}/")
    await relay.start()

    configure(settings.broker.url.get_secret_value())
    relay.reload()

    await relay.tells("relay.ready")


async def test_a_name_that_moves_is_followed_at_a_reload_and_at_a_reconnect(
    relay: ReloadableRelay, configure: Configure, settings: Settings, tmp_path: Path, outbox: Outbox, queue: Reader
) -> None:
    """The broker's name gets another address in /etc/hosts; the relay follows at a reload and at a reconnect."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a process a hosts file of its own")
    url, port, hosts = URL(settings.broker.url.get_secret_value()), free_port(), tmp_path / "hosts"
    relay.command = ["unshare", "--mount", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec {RELAY} run"]
    configure(url.with_host(NAME).with_port(port))
    hosts.write_text(f"127.0.0.2 {NAME}\n")
    upstream = str(url.host), url.port or 5672
    async with (
        FaultProxy(*upstream, at=("127.0.0.2", port)) as first,
        FaultProxy(*upstream, at=("127.0.0.3", port)) as second,
    ):
        await relay.start()
        assert (first.connections, second.connections) == (1, 0)

        hosts.write_text(f"127.0.0.3 {NAME}\n")
        relay.reload()
        await eventually(lambda: (first.connections, second.connections) == (0, 1), "it goes over")
        assert (await relay.tells("broker.left"))["host"] == f"{NAME}:{port} (127.0.0.2)"
        assert relay.events("broker.degraded") == []

        hosts.write_text(f"127.0.0.2 {NAME}\n")
        second.cut()
        await eventually(lambda: (first.connections, second.connections) == (1, 0), "it goes back")
        id_ = await outbox.insert()
        assert await queue.ids(1) == [id_]


@pytest.mark.drills
async def test_a_relay_moves_between_brokers_under_load_without_loss_or_repeats(
    relay: ReloadableRelay, configure: Configure, rabbitmq: RabbitServer, broker_url: str, database_url: str
) -> None:
    """Reloads move a relay to another broker and back under load; no message is lost or repeated."""
    with RabbitServer(schedulers=1) as other:
        other_url = other.add_vhost(f"moved_{secrets.token_hex(4)}")
        async with under_load(database_url, broker_url) as load, await aio_pika.connect(other_url) as connection:
            there = await declare_bound(await connection.channel(), load.queue.name)
            configure(broker_url)
            await relay.start()
            await load.comes_on()
            for url, queue, left in ((other_url, there, broker_url), (broker_url, load.queue, other_url)):
                configure(url)
                relay.reload()
                await eventually(lambda queue=queue: has_messages(queue), "it publishes to the other broker", 60)
                load.former += await drain(left, [queue.name])
                await load.comes_on()

            await load.finish()

        assert load.repeats == 0
        assert len(relay.events("broker.left")) == 2
        assert relay.events("broker.degraded", "confirm.timed_out") == []
        assert relay.stop(signal.SIGTERM) == 0


async def has_messages(queue: AbstractQueue) -> bool:
    declared = await queue.declare()
    return bool(declared.message_count)
