"""Each queue that is listed is looked at on every host, and no queue is made or changed by it."""

import asyncio
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity
from pamqp.common import FieldTable

from relay.config.settings import Route, Settings
from relay.config.topology import Binding, Overflow, Queue, QueueType, TopologySettings
from relay.operate import queues
from relay.operate.doctor.broker_hosts import OpenHost, close_each, connect_each
from relay.operate.doctor.finding import Verdict
from relay.operate.doctor.question import BrokerAnswer, exchange_like, queue_like
from tests.doctor.broker_findings import changed, findings_of, verdict


def listing(settings: Settings, bindings: tuple[Binding, ...] = (), **queue: Any) -> Settings:
    return settings.model_copy(
        update={"topology": TopologySettings(queues=(Queue(name="mine", **queue),), bindings=bindings)}
    )


async def test_a_queue_that_is_listed_may_be_missing_where_the_relay_declares_it(settings: Settings) -> None:
    listed = listing(settings)

    assert await verdict(listed, "queue") is Verdict.OK
    assert await verdict(changed(listed, "broker", declare=False), "queue") is Verdict.FAILED


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({"max_length": 5, "dead_letter_exchange": "dead"}, Verdict.OK),
        ({"max_length": 6, "dead_letter_exchange": "dead"}, Verdict.FAILED),
        ({"max_length": 5}, Verdict.FAILED),
        ({"max_length": 5, "dead_letter_exchange": "dead", "delivery_limit": 3}, Verdict.FAILED),
        ({"max_length": 5, "dead_letter_exchange": "dead", "type": QueueType.CLASSIC}, Verdict.FAILED),
    ],
)
async def test_a_quorum_queue_is_compared_with_what_is_listed(
    settings: Settings, channel: AbstractChannel, listed: dict[str, Any], expected: Verdict
) -> None:
    arguments: FieldTable = {"x-queue-type": "quorum", "x-max-length": 5, "x-dead-letter-exchange": "dead"}
    await channel.declare_queue("mine", durable=True, arguments=arguments)

    assert await verdict(listing(settings, **listed), "queue") is expected


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({"type": QueueType.CLASSIC}, Verdict.OK),
        ({"type": QueueType.CLASSIC, "durable": False}, Verdict.FAILED),
        ({"type": QueueType.STREAM}, Verdict.FAILED),
    ],
)
async def test_a_classic_queue_is_compared_with_what_is_listed(
    settings: Settings, channel: AbstractChannel, listed: dict[str, Any], expected: Verdict
) -> None:
    await channel.declare_queue("mine", durable=True, arguments={"x-queue-type": "classic"})

    assert await verdict(listing(settings, **listed), "queue") is expected


async def test_a_stream_is_compared_with_what_is_listed(settings: Settings, channel: AbstractChannel) -> None:
    await channel.declare_queue("mine", durable=True, arguments={"x-queue-type": "stream"})

    assert await verdict(listing(settings, type=QueueType.STREAM), "queue") is Verdict.OK
    assert await verdict(listing(settings, type=QueueType.STREAM, max_length_bytes=9), "queue") is Verdict.FAILED


@pytest.mark.parametrize(("durable", "expected"), [(True, Verdict.OK), (False, Verdict.WARNING)])
async def test_a_queue_that_a_route_addresses_has_to_be_there_and_durable(
    settings: Settings, channel: AbstractChannel, durable: bool, expected: Verdict
) -> None:
    routed = settings.model_copy(update={"routes": (Route(exchange="", routing_key="mine"),)})
    assert await verdict(routed, "queue") is Verdict.FAILED

    await channel.declare_queue("mine", durable=durable)

    assert await verdict(routed, "queue") is expected


@pytest.mark.parametrize(
    "arguments", [{"x-queue-type": "quorum"}, {"x-queue-type": "classic"}, {"x-queue-type": "stream"}, {}]
)
async def test_what_goes_away_before_it_is_compared_is_not_made(settings: Settings, arguments: dict[str, str]) -> None:
    hosts: list[OpenHost] = []
    async for _ in connect_each(settings, hosts):
        pass
    (host,) = hosts

    queue = await host.ask(queue_like("gone", durable=True, arguments=arguments))
    exchange = await host.ask(exchange_like("gone", "topic", durable=True))

    await close_each(hosts)
    assert (queue.answer, queue.difference) == (BrokerAnswer.REFUSED, None)
    assert (exchange.answer, exchange.difference) == (BrokerAnswer.REFUSED, None)
    async with await aio_pika.connect(settings.broker.url.get_secret_value()) as connection:
        with pytest.raises(ChannelNotFoundEntity):
            await (await connection.channel()).declare_queue("gone", passive=True)
        with pytest.raises(ChannelNotFoundEntity):
            await (await connection.channel()).get_exchange("gone", ensure=True)


@pytest.mark.parametrize(
    ("listed", "bindings", "expected", "words"),
    [
        ({}, (), Verdict.SKIPPED, "lists no dead_letter_exchange"),
        ({"dead_letter_exchange": "dead"}, (), Verdict.WARNING, "nothing that is listed is bound"),
        ({"dead_letter_exchange": "dead"}, (Binding(exchange="dead", queue="rest"),), Verdict.OK, "goes to dead"),
        ({"dead_letter_exchange": ""}, (), Verdict.OK, "the default exchange"),
    ],
)
async def test_dead_letters_need_a_place(
    settings: Settings, listed: dict[str, Any], bindings: tuple[Binding, ...], expected: Verdict, words: str
) -> None:
    (finding,) = await findings_of(listing(settings, bindings, **listed), "dead_letter")

    assert finding.verdict is expected
    assert words in finding.words


async def test_a_dead_letter_exchange_has_to_be_there(settings: Settings) -> None:
    of_dead_letters = [
        finding
        for finding in await findings_of(listing(settings, dead_letter_exchange="dead"), "exchange")
        if "exchange dead" in finding.words
    ]

    assert [finding.verdict for finding in of_dead_letters] == [Verdict.FAILED]


async def test_a_delivery_limit_that_is_not_listed_is_the_policy_s(settings: Settings) -> None:
    (version,) = await findings_of(settings, "version")
    (finding,) = await findings_of(listing(settings), "delivery_limit")

    if "RabbitMQ 4" in version.words:
        assert (finding.verdict, "after 20 deliveries" in finding.words) == (Verdict.WARNING, True)
    else:
        assert (finding.verdict, "RabbitMQ 3 has no limit" in finding.words) == (Verdict.SKIPPED, True)
    assert await findings_of(listing(settings, delivery_limit=5), "delivery_limit") == []
    assert await findings_of(listing(settings, type=QueueType.CLASSIC), "delivery_limit") == []


@pytest.mark.parametrize(
    ("listed", "expected", "words"),
    [
        ({}, Verdict.SKIPPED, "lists no limit"),
        ({"max_length": 5}, Verdict.WARNING, "its oldest messages are dropped"),
        ({"max_length_bytes": 5, "dead_letter_exchange": ""}, Verdict.WARNING, "go to the dead letters"),
        ({"max_length": 5, "overflow": Overflow.REJECT_PUBLISH}, Verdict.OK, "max_length = 5"),
        ({"type": QueueType.STREAM, "max_length_bytes": 5}, Verdict.OK, "max_length_bytes = 5"),
    ],
)
async def test_a_queue_is_bounded_without_losing_anything(
    settings: Settings, listed: dict[str, Any], expected: Verdict, words: str
) -> None:
    (finding,) = await findings_of(listing(settings, **listed), "growth")

    assert finding.verdict is expected
    assert words in finding.words


async def test_a_full_queue_that_refuses_is_named(settings: Settings, channel: AbstractChannel) -> None:
    listed = listing(settings, max_length=2, overflow=Overflow.REJECT_PUBLISH, type=QueueType.CLASSIC)
    (queue,) = listed.topology.queues
    await channel.declare_queue(queue.name, durable=True, arguments=queue.amqp_arguments())
    for _ in range(2):
        await channel.default_exchange.publish(aio_pika.Message(b"x"), queue.name)

    (finding,) = await findings_of(listed, "growth")

    assert finding.verdict is Verdict.WARNING
    assert f"queue {queue.name}" in finding.words
    assert "has 2 messages, so it is full" in finding.words


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "UNREAD_AFTER", 0.1)


async def put(channel: AbstractChannel, *names: str) -> None:
    """Declare queues with a message in each."""
    for name in names:
        await channel.declare_queue(name, durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"1"), name)


@pytest.mark.usefixtures("short_patience")
async def test_messages_in_a_queue_that_nothing_consumes_are_a_failure(
    settings: Settings, channel: AbstractChannel
) -> None:
    await put(channel, "mine")

    (finding,) = await findings_of(listing(settings), "consumers")

    assert finding.verdict is Verdict.FAILED
    assert (finding.words, finding.remedy) == ("nothing consumes mine, and 1 message waits", "start its consumer")


@pytest.mark.usefixtures("short_patience")
async def test_a_queue_with_a_consumer_and_one_without_messages_are_well(
    settings: Settings, channel: AbstractChannel
) -> None:
    queue = await channel.declare_queue("mine", durable=True)
    (empty,) = await findings_of(listing(settings), "consumers")
    await queue.consume(AbstractIncomingMessage.ack)
    (consumed,) = await findings_of(listing(settings), "consumers")

    assert [empty.verdict, consumed.verdict] == [Verdict.OK, Verdict.OK]
    assert consumed.words == "queue mine has 1 consumer"


@pytest.mark.usefixtures("short_patience")
async def test_dead_letters_need_no_consumer_and_a_missing_queue_is_told_elsewhere(
    settings: Settings, channel: AbstractChannel
) -> None:
    await put(channel, "failed")
    listed = TopologySettings(
        queues=(Queue(name="mine", dead_letter_exchange="", dead_letter_routing_key="failed"), Queue(name="failed"))
    )

    assert await findings_of(settings.model_copy(update={"topology": listed}), "consumers") == []


async def test_a_consumer_that_restarts_gets_some_seconds(settings: Settings, channel: AbstractChannel) -> None:
    await put(channel, "mine")
    looked = asyncio.create_task(findings_of(listing(settings), "consumers"))
    queue = await channel.get_queue("mine")
    await asyncio.sleep(1)
    await queue.consume(AbstractIncomingMessage.ack)

    (finding,) = await looked

    assert finding.verdict is Verdict.OK
