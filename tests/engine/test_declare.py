"""A relay declares what is listed once, at its start; what is taken away later stays away."""

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from aiormq.exceptions import ChannelNotFoundEntity
from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods
from pydantic import SecretStr
from structlog.testing import capture_logs
from yarl import URL

from relay.config.settings import BrokerSettings, Settings
from relay.config.topology import Binding, Exchange, Queue, QueueType, TopologySettings
from relay.engine.node import Node
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.definitions import definitions
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, FaultProxy, Way

TOPOLOGY = TopologySettings(
    exchanges=(Exchange(name="billing"),),
    queues=(Queue(name="invoices"), Queue(name="audit", type=QueueType.CLASSIC)),
    bindings=(Binding(exchange="billing", queue="invoices", routing_key="customer.*"),),
)
DECLARING = (
    ExchangeMethods.Declare,
    ExchangeMethods.Bind,
    QueueMethods.Declare,
    QueueMethods.Bind,
)


@pytest.fixture
def listing(settings: Settings) -> Settings:
    return settings.model_copy(update={"topology": TOPOLOGY})


def with_broker(settings: Settings, broker: BrokerSettings) -> Settings:
    return settings.model_copy(update={"broker": broker})


def is_ready(node: Node) -> bool:
    return node.is_ready() and not node.hindrances()


async def is_there(broker_url: str, queue: str) -> bool:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        try:
            await channel.declare_queue(queue, passive=True)
        except ChannelNotFoundEntity:
            return False
        return True


async def test_what_is_listed_is_there_when_it_is_ready(
    listing: Settings, run_node: RunNode, broker_url: str, rabbitmq: RabbitServer
) -> None:
    with capture_logs() as events:
        async with run_node(listing) as node:
            await eventually(node.is_ready, "ready")
            found = definitions(rabbitmq, broker_url)

    assert set(found.exchanges) == {"billing", "outbox"}
    assert {name: queue["type"] for name, queue in found.queues.items()} == {"invoices": "quorum", "audit": "classic"}
    assert found.bindings == [("billing", "queue", "invoices", "customer.*", {})]
    declared = [(event["kind"], event["name"]) for event in events if event["event"] == "topology.declared"]
    assert declared == [("exchange", "outbox"), ("exchange", "billing"), ("queue", "invoices"), ("queue", "audit")]


async def test_nothing_is_declared_on_a_reconnect(
    listing: Settings,
    run_node: RunNode,
    outbox: Outbox,
    channel: AbstractChannel,
    broker_url: str,
    rabbitmq: RabbitServer,
) -> None:
    def declarations(proxy: FaultProxy) -> int:
        return sum(proxy.seen[Way.UP, method] for method in DECLARING)

    async with proxied(listing.broker) as (proxy, far), run_node(with_broker(listing, far)) as node:
        await eventually(node.is_ready, "ready")
        at_the_start = declarations(proxy)
        await channel.queue_delete("invoices")
        await channel.exchange_delete("billing")

        proxy.cut(Act.RESET)
        await eventually(lambda: bool(node.snapshot().broker_losses), "the connection is lost")
        id_ = await outbox.insert(exchange="", routing_key="audit")
        await eventually(outbox.is_empty, "it is connected again, and delivers")

        assert await outbox.ids("sent") == [id_]
        assert at_the_start > 0
        assert declarations(proxy) == at_the_start
        found = definitions(rabbitmq, broker_url)
        assert (set(found.exchanges), set(found.queues)) == ({"outbox"}, {"audit"})

    async with run_node(listing) as node:  # a start is no reconnect
        await eventually(node.is_ready, "ready")
        assert await is_there(broker_url, "invoices")


async def test_a_difference_is_told_and_the_relay_delivers(
    listing: Settings, run_node: RunNode, outbox: Outbox, queue: Reader, channel: AbstractChannel
) -> None:
    await channel.declare_queue("invoices", durable=True)  # a classic one
    nowhere = Binding(exchange="nowhere", queue="invoices")
    topology = TOPOLOGY.model_copy(update={"bindings": (*TOPOLOGY.bindings, nowhere)})

    with capture_logs() as events:
        async with run_node(listing.model_copy(update={"topology": topology})):
            id_ = await outbox.insert()
            assert await queue.ids(1) == [id_]

    (differing,) = (event for event in events if event["event"] == "topology.differs")
    (failed,) = (event for event in events if event["event"] == "topology.failed")
    assert (differing["log_level"], failed["log_level"]) == ("warning", "warning")
    assert (differing["kind"], differing["name"]) == ("queue", "invoices")
    assert "inequivalent arg 'x-queue-type'" in differing["reason"]
    assert (failed["name"], failed["reason"]) == ("nowhere -> invoices", failed["reason"])
    assert failed["reason"].startswith("NOT_FOUND - no exchange 'nowhere'")
    assert differing["remedy"]
    assert failed["remedy"]


async def test_it_declares_nothing_when_told_so(
    listing: Settings, run_node: RunNode, broker_url: str, rabbitmq: RabbitServer
) -> None:
    silent = listing.model_copy(update={"broker": listing.broker.model_copy(update={"declare": False})})

    async with run_node(silent) as node:
        await eventually(node.is_ready, "ready")

    found = definitions(rabbitmq, broker_url)
    assert (found.exchanges, found.queues, found.bindings) == ({}, {}, [])


@pytest.mark.parametrize(
    ("ended", "missing"),
    [([2], set()), ([2, 4, 6], {"invoices", "billing -> invoices (customer.*)"})],
    ids=["once", "each-time"],
)
async def test_what_ends_the_connection_is_tried_three_times(
    ended: list[int], missing: set[str], listing: Settings, run_node: RunNode, broker_url: str, rabbitmq: RabbitServer
) -> None:
    async with proxied(listing.broker) as (proxy, far):
        for nth in ended:  # the odd ones only look whether `invoices` is there
            proxy.on_frame(Way.UP, QueueMethods.Declare, nth, Act.RESET)
        with capture_logs() as events:
            async with run_node(with_broker(listing, far)) as node:
                await eventually(lambda: is_ready(node), "ready")

    failed = {event["name"] for event in events if event["event"] == "topology.failed"}
    assert failed == missing
    found = definitions(rabbitmq, broker_url)
    assert set(found.queues) == {"invoices", "audit"} - missing
    assert set(found.exchanges) == {"billing", "outbox"}


async def test_a_host_that_does_not_answer_is_left_and_all_is_declared_through_the_next(
    listing: Settings,
    run_node: RunNode,
    broker_url: str,
    rabbitmq: RabbitServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.servers.rabbitmq.topology.DECLARE_TIMEOUT", 3.0)
    async with proxied(listing.broker) as (proxy, far):
        proxy.on_frame(Way.DOWN, QueueMethods.DeclareOk, 1, Act.HOLD)
        urls = f"{far.url.get_secret_value()},{broker_url}"
        broker = listing.broker.model_copy(update={"url": SecretStr(urls)})
        with capture_logs() as events:
            async with run_node(with_broker(listing, broker)) as node:
                await eventually(lambda: is_ready(node), "ready")

    (degraded,) = (event["reason"] for event in events if event["event"] == "broker.degraded")
    assert degraded == "connection lost: declare invoices: no answer within 3 s"
    assert set(definitions(rabbitmq, broker_url).queues) == {"invoices", "audit"}


async def test_the_relay_runs_without_the_permission_to_configure(
    listing: Settings, run_node: RunNode, outbox: Outbox, broker_url: str, rabbitmq: RabbitServer
) -> None:
    user = broker_url.rpartition("/")[2]
    rabbitmq.call(
        f'rabbit_auth_backend_internal:add_user(<<"{user}">>, <<"pw">>, <<"tests">>), rabbit_auth_backend_internal:'
        f'set_permissions(<<"{user}">>, <<"{user}">>, <<"^$">>, <<".*">>, <<".*">>, <<"tests">>).'
    )
    url = SecretStr(str(URL(broker_url).with_user(user).with_password("pw")))
    with capture_logs() as events:
        async with run_node(
            listing.model_copy(update={"broker": listing.broker.model_copy(update={"url": url})})
        ) as node:
            await eventually(node.is_ready, "ready")
            await outbox.insert()
            await eventually(outbox.is_empty, "it waits in quarantine")
    rabbitmq.call(f'rabbit_auth_backend_internal:delete_user(<<"{user}">>, <<"tests">>).')

    assert await outbox.quarantined_routes() == [("outbox", "customer.InvoiceIssued")]
    refused = [event["name"] for event in events if event["event"] == "topology.failed"]
    assert refused == ["outbox", "billing", "invoices", "audit", "billing -> invoices (customer.*)"]
