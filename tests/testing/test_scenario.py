"""A scenario runs relay and consumers on real servers; a wait that takes too long says what hinders it."""

import asyncio
from pathlib import Path
from uuid import UUID, uuid4

import aio_pika
import psycopg
import pytest

from relay.consume import Consumer, Inbox, Message, Permanent, on
from relay.errors import BrokerUnavailableError, ConfigurationError, QueueMissingError
from relay.outbox import Event, add
from relay.testing import Scenario, virtual_host
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer

QUEUE = "billing"
TOPOLOGY = """
    [[topology.exchanges]]
    name = "outbox"

    [[topology.queues]]
    name = "billing"

    [[topology.bindings]]
    exchange = "outbox"
    queue = "billing"
    routing_key = "invoice.InvoicePaid"
"""


@on("InvoicePaid")
async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
    if message.json()["amount"] < 0:
        raise Permanent("an amount below zero")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "relay.toml"
    file.write_text(TOPOLOGY)
    return file


def pay(database_url: str, amount: int, event_type: str = "InvoicePaid") -> UUID:
    event = Event("invoice", 42, event_type, {"amount": amount})
    with psycopg.connect(database_url) as connection:
        add(connection, event)
    return event.message_id


def is_quarantined(database_url: str) -> bool:
    with psycopg.connect(database_url) as connection:
        return connection.execute("SELECT FROM outbox.message_state WHERE state = 'quarantined'").rowcount == 1


def consumer(database_url: str, broker_url: str) -> Consumer:
    return Consumer(QUEUE, [note], inbox=Inbox(database_url, "accounting"), broker=broker_url)


async def test_what_is_written_is_applied(database_url: str, broker_url: str, config: Path) -> None:
    ours = consumer(database_url, broker_url)
    async with Scenario(database_url, broker_url, ours, config=config, timeout=60) as scenario:
        message_id = await asyncio.to_thread(pay, database_url, 5)

        await scenario.until_applied(message_id, "accounting")
        await scenario.until(lambda: ours.counters.applied == 1)


async def test_a_timeout_says_what_hinders(database_url: str, broker_url: str, config: Path) -> None:
    ours = consumer(database_url, broker_url)
    async with Scenario(database_url, broker_url, ours, config=config, timeout=60) as scenario:
        await asyncio.to_thread(pay, database_url, -1)
        await asyncio.to_thread(pay, database_url, 1, "InvoiceLost")
        await scenario.until(lambda: ours.counters.dead_letters.total() == 1, "the first one is given up")
        await scenario.until(lambda: asyncio.to_thread(is_quarantined, database_url), "the other has no queue")

        with pytest.raises(TimeoutError) as late:
            await scenario.until_applied(uuid4(), "accounting", timeout=0.5)

    words = str(late.value)
    assert "accounting applies " in words.splitlines()[0]
    assert (
        "dead letter: 1 of InvoicePaid at billing.dead: relay.consume.classify.Permanent: an amount below zero" in words
    )
    assert "InvoiceLost of invoice 42" in words
    assert "quarantine: 1 of any type at outbox: " in words


async def test_without_a_hindrance_it_says_so(database_url: str, broker_url: str, config: Path) -> None:
    async with Scenario(database_url, broker_url, config=config, timeout=60) as scenario:
        with pytest.raises(TimeoutError, match=r"never: not within 0.5 s\n  nothing hinders relay and consumers"):
            await scenario.until(lambda: False, "never", timeout=0.5)


async def test_a_consumer_that_cannot_start_is_raised_and_the_relay_ends(database_url: str, broker_url: str) -> None:
    with pytest.raises(QueueMissingError):
        async with Scenario(database_url, broker_url, consumer(database_url, broker_url)):
            pytest.fail("the block has begun")


async def test_a_topology_that_cannot_be_is_refused(database_url: str, broker_url: str, config: Path) -> None:
    async with await aio_pika.connect(broker_url) as connection:
        await (await connection.channel()).declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "classic"})

        with pytest.raises(ConfigurationError, match="queue billing: "):
            async with Scenario(database_url, broker_url, config=config):
                pytest.fail("the block has begun")


async def test_each_test_has_a_virtual_host(managed: tuple[RabbitServer, str]) -> None:
    server, management = managed
    with virtual_host(server.url(), management) as first, virtual_host(server.url(), management) as second:
        assert first != second
        async with await aio_pika.connect(first) as connection:
            await (await connection.channel()).declare_queue("billing")

    assert "outbox_test" not in server.ctl("list_vhosts")


def test_a_server_without_the_plugin_or_the_right_is_told(managed: tuple[RabbitServer, str]) -> None:
    server, management = managed
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(BrokerUnavailableError, match="`rabbitmq-plugins enable"), virtual_host(server.url(), nowhere):
        pytest.fail("it was made")
    server.ctl("add_user", "application", "secret")
    other = server.url().replace("relay:", "application:", 1)
    with pytest.raises(ConfigurationError, match="refuses 'application'"), virtual_host(other, management):
        pytest.fail("it was made")
