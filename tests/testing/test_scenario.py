"""A scenario runs relay and consumers on real servers; a wait that takes too long says what hinders it."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID, uuid4

import aio_pika
import psycopg
import pytest

from relay.consume import Consumer, FailurePolicy, Inbox, Message, Permanent, Retries, on
from relay.consume.apply.handlers import AsyncHandler
from relay.errors import BrokerUnavailableError, ConfigurationError, QueueMissingError
from relay.outbox import Event, add, event
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


@event("InvoicePaid", key=("invoice", "number"))
@dataclass
class Paid:
    number: int
    amount: int


@on("InvoicePaid")
async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
    if message.json()["amount"] < 0:
        raise Permanent("an amount below zero")


def consumer_of(handler: AsyncHandler, database_url: str, broker_url: str, order: Literal["hold", "skip"]) -> Consumer:
    policy = FailurePolicy(order=order, retries=Retries(attempts=3, initial=30, maximum=60))
    return Consumer(QUEUE, [handler], inbox=Inbox(database_url, "accounting"), broker=broker_url, failures=policy)


async def words_of_timeout(scenario: Scenario, message: UUID | Event, consumer_name: str = "accounting") -> str:
    with pytest.raises(TimeoutError) as late:
        await scenario.until_applied(message, consumer_name, timeout=0.5)
    return str(late.value)


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


async def test_an_inbox_that_tells_writers_apart_applies_a_message(
    database_url: str, broker_url: str, config: Path
) -> None:
    ours = Consumer(QUEUE, [note], inbox=Inbox(database_url, "accounting", scope="writer"), broker=broker_url)
    async with Scenario(database_url, broker_url, ours, config=config, timeout=60) as scenario:
        message_id = await asyncio.to_thread(pay, database_url, 5)

        await scenario.until_applied(message_id, "accounting")


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


@pytest.mark.parametrize(
    ("order", "place"),
    [
        ("skip", "retry queue billing.retry.30000: 1 waiting"),
        ("hold", "held: 1 of InvoicePaid at accounting: KeyError: 'sum of 2026'"),
    ],
)
async def test_a_timeout_says_what_handlers_raised_and_where_it_waits(
    database_url: str, broker_url: str, config: Path, order: Literal["hold", "skip"], place: str
) -> None:
    @on("InvoicePaid")
    async def fail(message: Message, connection: psycopg.AsyncConnection) -> None:
        raise KeyError("sum of 2026")

    ours = consumer_of(fail, database_url, broker_url, order)
    async with Scenario(database_url, broker_url, ours, config=config, timeout=60) as scenario:
        message_id = await asyncio.to_thread(pay, database_url, 1)
        await scenario.until(lambda: ours.counters.retried.total() == 1 and ours.counters.unacknowledged == 0)
        words = await words_of_timeout(scenario, message_id)

    assert "consumer of billing: tries that failed: 1, by KeyError: 'sum of 2026' (try 1 of 3, again in " in words
    assert place in words
    assert "its row is sent" in words
    assert "nothing" not in words


async def test_a_timeout_says_what_a_handler_works_on(database_url: str, broker_url: str, config: Path) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    @on("InvoicePaid")
    async def hang(message: Message, connection: psycopg.AsyncConnection) -> None:
        begun.set()
        await goes_on.wait()

    ours = consumer_of(hang, database_url, broker_url, "hold")
    async with Scenario(database_url, broker_url, ours, config=config, timeout=60) as scenario:
        message_id = await asyncio.to_thread(pay, database_url, 1)
        await begun.wait()
        words = await words_of_timeout(scenario, message_id)
        goes_on.set()
        await scenario.until_applied(message_id, "accounting")

    assert "consumer of billing: messages in hand: 1, of which handlers work on 1" in words


async def test_a_timeout_says_that_the_wait_itself_is_wrong(database_url: str, broker_url: str, config: Path) -> None:
    ours = consumer(database_url, broker_url)
    event = Event("invoice", 42, "InvoicePaid", {"amount": 1})
    async with Scenario(database_url, broker_url, ours, config=config, timeout=60) as scenario:
        with psycopg.connect(database_url) as connection:
            add(connection, event)
            not_committed = await words_of_timeout(scenario, event)
        await scenario.until_applied(event, "accounting")
        misspelt = await words_of_timeout(scenario, event, "acounting")
        with pytest.raises(TypeError, match="dict has no message_id"):
            await scenario.until_applied({}, "accounting")  # type: ignore[arg-type]

    assert not_committed.endswith("no committed row has this message_id")
    assert "no consumer is named acounting; there is accounting\n  its row is sent" in misspelt


async def test_a_type_and_key_stand_for_the_newest_row(database_url: str, broker_url: str, config: Path) -> None:
    ours = consumer(database_url, broker_url)
    await asyncio.to_thread(pay, database_url, 1)
    async with Scenario(database_url, broker_url, ours, config=config, timeout=60) as scenario:
        await scenario.until(lambda: ours.counters.applied == 1)
        with pytest.raises(TimeoutError) as early:
            await scenario.until_applied("InvoicePaid", "accounting", key=("invoice", "42"), timeout=0.5)
        waiting = asyncio.create_task(scenario.until_applied("InvoicePaid", "accounting", key=42))
        await asyncio.to_thread(pay, database_url, 2)
        await waiting
        await scenario.until_applied(Paid, "accounting", key=("invoice", "42"))
        assert ours.counters.applied == 2

        await asyncio.to_thread(pay, database_url, -1)
        with pytest.raises(TimeoutError) as late:
            await scenario.until_applied(Paid, "accounting", timeout=5)
        with pytest.raises(TypeError, match="key is for a type"):
            await scenario.until_applied(uuid4(), "accounting", key=42)

    first, *rest = str(early.value).splitlines()
    assert first == "accounting applies InvoicePaid with key ('invoice', '42'): not within 0.5 s"
    assert "  no committed row of this type and key since the scenario began" in rest
    assert "accounting applies InvoicePaid: not within 5 s" in str(late.value)
    assert "its row is sent" in str(late.value)


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


def test_a_broker_without_the_place_of_its_plugin_is_told_the_variable() -> None:
    words = "`rabbitmq-plugins enable rabbitmq_management`, or say where .* OUTBOX_TEST_MANAGEMENT_URL"
    with pytest.raises(BrokerUnavailableError, match=words), virtual_host("amqp://guest@broker.invalid"):
        pytest.fail("it was made")
    with pytest.raises(ConfigurationError, match="OUTBOX_TEST_BROKER_URL"), virtual_host("http://broker.invalid"):
        pytest.fail("it was made")
