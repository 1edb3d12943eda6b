"""The broker stops and starts: what is durable remains, and the relay and the consumer need nothing else."""

import asyncio
from collections.abc import Iterator

import aio_pika
import pytest
from aio_pika import DeliveryMode, ExchangeType
from pamqp.common import FieldTable
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, Settings
from relay.config.topology import Binding, Exchange, Queue, TopologySettings
from relay.consume import Consumer, Inbox, WorkPolicy
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import Queue as Consumed
from tests.consume.effects import Table, running
from tests.consume.policies import QUICK
from tests.engine.conftest import Outbox, RunNode
from tests.http.consumers import Hanging, inbox, table
from tests.support.definitions import definitions
from tests.support.eventually import eventually

__all__ = ["inbox", "table"]

pytestmark = pytest.mark.drills

OURS = TopologySettings(
    exchanges=(Exchange(name="billing"),),
    queues=(Queue(name="invoices"),),
    bindings=(Binding(exchange="outbox", queue="invoices", routing_key="customer.*"),),
)
QUORUM: FieldTable = {"x-queue-type": "quorum"}


@pytest.fixture
def node() -> Iterator[RabbitServer]:
    """A broker that the test may stop and start."""
    with RabbitServer(schedulers=1) as server:
        yield server


@pytest.fixture
def url(node: RabbitServer) -> str:
    return node.add_vhost("state")


@pytest.fixture
def its_settings(settings: Settings, url: str) -> Settings:
    broker = settings.broker.model_copy(update={"url": SecretStr(url)})
    return settings.model_copy(update={"broker": broker, "topology": OURS})


async def test_what_is_durable_survives_and_what_is_transient_does_not(node: RabbitServer, url: str) -> None:
    """The broker stops and starts; durable exchanges, queues and bindings remain, and transient ones are gone."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        for durable in (True, False):
            kind = "durable" if durable else "transient"
            exchange = await channel.declare_exchange(kind, ExchangeType.TOPIC, durable=durable)
            queue = await channel.declare_queue(f"{kind} classic", durable=durable)
            await queue.bind(exchange, "classic")
        await (await channel.declare_queue("quorum", durable=True, arguments=QUORUM)).bind("durable", "quorum")
        await (await channel.get_queue("transient classic")).bind("durable", "classic")
        durable_exchange = await channel.get_exchange("durable")
        for mode in (DeliveryMode.PERSISTENT, DeliveryMode.NOT_PERSISTENT):
            for key in ("classic", "quorum"):
                await durable_exchange.publish(aio_pika.Message(mode.name.encode(), delivery_mode=mode), key)

    node.stop()
    node.start()

    found = definitions(node, url)
    assert set(found.exchanges) == {"durable"}
    assert set(found.queues) == {"durable classic", "quorum"}
    assert {(exchange, queue, key) for exchange, _, queue, key, _ in found.bindings} == {
        ("durable", "durable classic", "classic"),
        ("durable", "quorum", "quorum"),
    }
    # A quorum queue keeps every message, whatever its mode.
    assert await bodies(url, "durable classic") == [b"PERSISTENT"]
    assert await bodies(url, "quorum") == [b"PERSISTENT", b"NOT_PERSISTENT"]


async def test_what_the_relay_has_declared_and_sent_is_there_and_it_goes_on(
    node: RabbitServer, url: str, its_settings: Settings, outbox: Outbox, run_node: RunNode
) -> None:
    """The broker stops and starts under a relay; its topology and messages remain, and the relay goes on."""
    async with run_node(its_settings) as relay:
        await eventually(relay.is_ready, "ready")
        before = [await outbox.insert() for _ in range(20)]
        await eventually(outbox.is_empty, "all are sent")

        await asyncio.to_thread(node.stop)
        meanwhile = await outbox.insert()
        await asyncio.to_thread(node.launch)
        await asyncio.to_thread(node.await_up)
        await eventually(outbox.is_empty, "it goes on", 30)

    found = definitions(node, url)
    assert set(found.exchanges) == {"billing", "outbox"}
    assert set(found.queues) == {"invoices"}
    async with await aio_pika.connect(url) as connection:
        queue = await (await connection.channel()).get_queue("invoices")
        arrived = [(await queue.get(no_ack=True)).headers["x-outbox-id"] for _ in range(21)]
        assert arrived == [*before, meanwhile]
        assert await queue.get(no_ack=True, fail=False) is None


async def test_a_consumer_has_its_queues_back_and_each_message_takes_effect_once(
    node: RabbitServer, url: str, table: Table, inbox: Inbox
) -> None:
    """The broker stops and starts under a consumer; each message takes effect once, in order per key."""
    hanging = Hanging()
    async with await aio_pika.connect(url) as connection:
        queue = Consumed(await connection.channel())
        await queue.declare()
        for number in range(20):
            await queue.send(number, key=str(number % 4))
    broker = BrokerSettings(url=SecretStr(url))
    consumer = Consumer(
        queue.name,
        [hanging.handle],
        inbox=inbox,
        broker=broker,
        work=WorkPolicy(concurrency=4, backoff=QUICK, drain_timeout=600),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.in_flight > 0, "handlers run")

        await asyncio.to_thread(node.stop)
        await eventually(lambda: "CONNECTION_FORCED" in consumer.hindrances().get("broker", ""), "it notices")
        hanging.let_go.set()
        await eventually(lambda: consumer.counters.in_flight == 0, "what is in hand ends")
        committed = consumer.counters.applied  # and cannot be acknowledged
        await asyncio.to_thread(node.launch)
        await asyncio.to_thread(node.await_up)
        await eventually(lambda: consumer.counters.applied == 20, "it goes on")
        await eventually(lambda: consumer.counters.duplicates == committed, "what comes again is known")

    for key in range(4):
        assert await table.numbers(str(key)) == list(range(key, 20, 4))
    assert committed > 0
    assert consumer.counters.deliveries <= 20 + consumer.prefetch
    assert set(definitions(node, url).queues) == {"billing", "billing.dead"}


async def bodies(url: str, queue: str) -> list[bytes]:
    """Return the bodies of all messages of a queue."""
    found: list[bytes] = []
    async with await aio_pika.connect(url) as connection:
        taken = await (await connection.channel()).get_queue(queue)
        while (message := await taken.get(no_ack=True, fail=False)) is not None:
            found.append(message.body)
    return found
