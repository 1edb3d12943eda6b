"""What relay.toml lists is declared as it is listed, twice is as good as once, and what is there stays as it is."""

from typing import Any

import aio_pika
import pytest

from relay.config.settings import BrokerSettings
from relay.config.topology import (
    Binding,
    Exchange,
    ExchangeType,
    Overflow,
    Queue,
    QueueType,
    TopologySettings,
)
from relay.servers.rabbitmq.topology import BAD, Standing, apply
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.definitions import definitions

EXCHANGES = tuple(Exchange(name=f"e.{each}", type=each) for each in ExchangeType)
BOUNDS: dict[str, Any] = {
    "dead_letter_exchange": "e.fanout",
    "dead_letter_routing_key": "dead",
    "max_length": 100,
    "max_length_bytes": 1_000_000,
    "message_ttl": 1.5,
    "single_active_consumer": True,
}
BOUND_ARGUMENTS = {
    "x-dead-letter-exchange": "e.fanout",
    "x-dead-letter-routing-key": "dead",
    "x-max-length": 100,
    "x-max-length-bytes": 1_000_000,
    "x-message-ttl": 1500,
    "x-single-active-consumer": True,
}
WHOLE = TopologySettings(
    exchanges=(
        *EXCHANGES,
        Exchange(name="lost", durable=False, type=ExchangeType.FANOUT, alternate_exchange="e.topic"),
    ),
    queues=(
        Queue(name="plain"),
        Queue(name="quorum", **BOUNDS, delivery_limit=3, overflow=Overflow.REJECT_PUBLISH),
        Queue(name="classic", type=QueueType.CLASSIC, **BOUNDS, overflow=Overflow.DROP_HEAD),
        Queue(name="transient", type=QueueType.CLASSIC, durable=False, arguments={"x-max-priority": 5}),
        Queue(name="stream", type=QueueType.STREAM, max_length_bytes=5_000_000_000, arguments={"x-max-age": "7D"}),
        Queue(name="odd -_.:@#,/+ name"),
    ),
    bindings=(
        Binding(exchange="e.topic", queue="quorum", routing_key="customer.*"),
        Binding(exchange="e.headers", queue="classic", arguments={"x-match": "all", "format": "pdf", "pages": 3}),
        Binding(exchange="e.fanout", to_exchange="e.direct"),
        Binding(exchange="amq.topic", queue="stream", routing_key="#"),
    ),
)


def standings(results: Any) -> dict[str, Standing]:
    return {each.name: each.standing for each in results}


async def test_each_kind_is_declared_with_each_argument(
    broker: BrokerSettings, broker_url: str, rabbitmq: RabbitServer
) -> None:
    results = await apply(broker, WHOLE)

    assert {each.standing for each in results if each.kind != "binding"} == {Standing.DECLARED}
    assert {each.standing for each in results if each.kind == "binding"} == {Standing.BOUND}
    found = definitions(rabbitmq, broker_url)
    usual = {"durable": True, "auto_delete": False}
    assert found.exchanges == {
        **{f"e.{each}": {**usual, "type": each, "arguments": {}} for each in ExchangeType},
        "lost": {
            "type": "fanout",
            "durable": False,
            "auto_delete": False,
            "arguments": {"alternate-exchange": "e.topic"},
        },
    }
    assert found.queues == {
        "plain": {**usual, "type": "quorum", "arguments": {"x-queue-type": "quorum"}},
        "quorum": {
            **usual,
            "type": "quorum",
            "arguments": {
                **BOUND_ARGUMENTS,
                "x-queue-type": "quorum",
                "x-delivery-limit": 3,
                "x-overflow": "reject-publish",
            },
        },
        "classic": {
            **usual,
            "type": "classic",
            "arguments": {**BOUND_ARGUMENTS, "x-queue-type": "classic", "x-overflow": "drop-head"},
        },
        "transient": {
            "type": "classic",
            "durable": False,
            "auto_delete": False,
            "arguments": {"x-queue-type": "classic", "x-max-priority": 5},
        },
        "stream": {
            **usual,
            "type": "stream",
            "arguments": {"x-queue-type": "stream", "x-max-length-bytes": 5_000_000_000, "x-max-age": "7D"},
        },
        "odd -_.:@#,/+ name": {**usual, "type": "quorum", "arguments": {"x-queue-type": "quorum"}},
    }
    assert found.bindings == [
        ("amq.topic", "queue", "stream", "#", {}),
        ("e.fanout", "exchange", "e.direct", "", {}),
        ("e.headers", "queue", "classic", "", {"x-match": "all", "format": "pdf", "pages": 3}),
        ("e.topic", "queue", "quorum", "customer.*", {}),
    ]


async def test_a_second_time_changes_nothing(broker: BrokerSettings, broker_url: str, rabbitmq: RabbitServer) -> None:
    await apply(broker, WHOLE)
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        await channel.default_exchange.publish(aio_pika.Message(b"kept"), "plain")
        before = definitions(rabbitmq, broker_url)

        results = await apply(broker, WHOLE)

        assert {each.standing for each in results} == {Standing.THERE, Standing.BOUND}
        assert definitions(rabbitmq, broker_url) == before
        declared = await channel.declare_queue("plain", passive=True)
        assert declared.declaration_result.message_count == 1


@pytest.mark.parametrize("there", [None, "fanout"])
async def test_the_default_exchange_is_declared_when_something_is_bound_to_it(
    broker: BrokerSettings, broker_url: str, there: str | None
) -> None:
    if there:
        async with await aio_pika.connect(broker_url) as connection:
            channel = await connection.channel()
            await channel.declare_exchange(broker.exchange, there, durable=True)
    bound = TopologySettings(
        queues=(Queue(name="plain"),),
        bindings=(Binding(exchange=broker.exchange, queue="plain", routing_key="customer.*"),),
    )

    assert standings(await apply(broker, bound)) == {
        "outbox": Standing.THERE if there else Standing.DECLARED,
        "plain": Standing.DECLARED,
        "outbox -> plain (customer.*)": Standing.BOUND,
    }


async def test_what_another_client_declared_with_the_same_meaning_is_as_listed(
    broker: BrokerSettings, broker_url: str
) -> None:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("old", durable=True, arguments={"x-message-ttl": 1000})  # the type by default

    results = await apply(
        broker, TopologySettings(queues=(Queue(name="old", type=QueueType.CLASSIC, message_ttl=1.0),))
    )

    assert standings(results) == {"old": Standing.THERE}


async def test_each_difference_is_named_in_the_broker_s_words_and_stays(
    broker: BrokerSettings, broker_url: str, rabbitmq: RabbitServer
) -> None:
    await apply(broker, WHOLE)
    before = definitions(rabbitmq, broker_url)
    other = TopologySettings(
        exchanges=(
            Exchange(name="e.topic", type=ExchangeType.DIRECT),
            Exchange(name="lost", type=ExchangeType.FANOUT, alternate_exchange="e.topic"),
            Exchange(name="e.fanout", type=ExchangeType.FANOUT, alternate_exchange="e.topic"),
        ),
        queues=(
            Queue(name="plain", type=QueueType.CLASSIC),
            Queue(name="quorum", **{**BOUNDS, "max_length": 7}, delivery_limit=3, overflow=Overflow.REJECT_PUBLISH),
            Queue(name="stream", type=QueueType.STREAM, max_length_bytes=5_000_000_000, arguments={"x-max-age": "8D"}),
            Queue(name="new"),
        ),
    )

    results = await apply(broker, other)

    differing = {each.name: each for each in results if each.standing is Standing.DIFFERS}
    assert {name: each.words.partition(" for ")[0] for name, each in differing.items()} == {
        "e.topic": "PRECONDITION_FAILED - inequivalent arg 'type'",
        "lost": "PRECONDITION_FAILED - inequivalent arg 'durable'",
        "e.fanout": "PRECONDITION_FAILED - inequivalent arg 'alternate-exchange'",
        "plain": "PRECONDITION_FAILED - inequivalent arg 'x-queue-type'",
        "quorum": "PRECONDITION_FAILED - inequivalent arg 'x-max-length'",
        "stream": "PRECONDITION_FAILED - inequivalent arg 'x-max-age'",
    }
    assert "or delete it with its messages" in differing["plain"].remedy
    assert standings(results)["new"] is Standing.DECLARED
    after = definitions(rabbitmq, broker_url)
    assert after.exchanges == before.exchanges
    assert {**after.queues, "new": None} == {**before.queues, "new": None}


async def test_what_the_broker_never_accepts_does_not_keep_the_rest_undeclared(
    broker: BrokerSettings,
) -> None:
    topology = TopologySettings(
        queues=(Queue(name="first", arguments={"x-max-priority": 5}), Queue(name="second")),
        bindings=(
            Binding(exchange="nowhere", queue="second"),
            Binding(exchange="amq.topic", queue="nowhere"),
            Binding(exchange="amq.headers", queue="second", arguments={"x-match": "odd"}),
            Binding(exchange="amq.fanout", queue="second"),
        ),
    )

    results = await apply(broker, topology)

    assert [(each.standing, each.words.partition(" in vhost")[0]) for each in results] == [
        (Standing.FAILED, "PRECONDITION_FAILED - invalid arg 'x-max-priority' for queue 'first'"),
        (Standing.DECLARED, ""),
        (Standing.FAILED, "NOT_FOUND - no exchange 'nowhere'"),
        (Standing.FAILED, "NOT_FOUND - no queue 'nowhere'"),
        (
            Standing.FAILED,
            'PRECONDITION_FAILED - Invalid x-match field value <<"odd">>; expected all, any, all-with-x, or any-with-x',
        ),
        (Standing.BOUND, ""),
    ]
    assert all(each.remedy for each in results if each.standing in BAD)


async def test_a_dry_run_declares_nothing(broker: BrokerSettings, broker_url: str, rabbitmq: RabbitServer) -> None:
    nowhere = Binding(exchange="e.topic", queue="nowhere")
    planned = WHOLE.model_copy(update={"bindings": (*WHOLE.bindings, nowhere)})
    half = TopologySettings(exchanges=EXCHANGES, queues=(WHOLE.queues[0], Queue(name="quorum")))
    await apply(broker, half)
    before = definitions(rabbitmq, broker_url)

    results = await apply(broker, planned, dry_run=True)

    assert definitions(rabbitmq, broker_url) == before
    seen = standings(results)
    assert seen["plain"] is seen["e.topic"] is Standing.THERE
    assert seen["quorum"] is Standing.DIFFERS
    assert seen["classic"] is seen["amq.topic -> stream (#)"] is Standing.MISSING
    assert seen["e.fanout -> e.direct"] is Standing.UNSEEN
    assert seen["e.topic -> nowhere"] is Standing.FAILED
