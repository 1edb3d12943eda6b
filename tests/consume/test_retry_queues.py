"""order = "skip": a failed message goes to a retry queue and comes back, and nothing of it is lost on the way."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import psycopg
import pytest
from pamqp.commands import Basic
from structlog.testing import capture_logs
from yarl import URL

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Retries, Transient, WorkPolicy, on
from relay.errors import QueueUnfitError
from relay.testing.servers.process import Process
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import MakeConsumer, Queue, Stumbling, Table, count, running
from tests.consume.policies import QUICK, SOON
from tests.consume.process import BURDEN, COMMAND, environment
from tests.support.events import times
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way

ONE_STEP = Retries(attempts=3, initial=0.05, maximum=0.05, jitter=0.0)
RETRY_ARGUMENTS: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-message-ttl": 50,
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": "billing",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}


async def test_it_comes_back_as_it_was_and_its_followers_pass(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    exchange = await queue.channel.declare_exchange("billing.events", "topic", durable=True)
    await (await queue.channel.get_queue(queue.name)).bind(exchange, "#")
    seen: list[Message] = []

    @on("Counted")
    async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
        seen.append(message)
        await count(message, connection)
        if message.json() == 0 and len(seen) < 4:
            raise Transient("the shop is closed")

    for number in (0, 1):
        await exchange.publish(
            aio_pika.Message(
                b"%d" % number,
                message_id=f"00000000-0000-0000-0000-00000000000{number}",
                type="Counted",
                headers={"x-aggregate-type": "counter", "x-aggregate-id": "a", "CC": ["nowhere"]},
                expiration=600,
            ),
            "counter.Counted",
        )
    consumer = make_consumer(note, order="skip", retries=ONE_STEP, work=WorkPolicy(concurrency=1))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 2, "both are applied")

    assert await table.numbers() == [1, 0]
    first, back = [message for message in seen if message.json() == 0][::2]
    assert (back.message_id, back.body, back.routing_key) == (first.message_id, b"0", "counter.Counted")
    assert not back.redelivered
    told = {name: value for name, value in back.headers.items() if name not in first.headers}
    assert told["x-retry-attempts"] == 2
    assert told["x-exception"] == "relay.consume.classify.Transient"
    assert told["x-exception-message"] == "the shop is closed"
    assert told["x-first-failure"] < told["x-last-failure"]
    assert (told["x-original-exchange"], told["x-original-routing-key"]) == ("billing.events", "counter.Counted")
    assert consumer.counters.retried == {0.05: 2}
    assert await queue.drained()


async def test_many_come_back_within_the_longest_wait_of_their_step(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """Those behind one with a longer wait wait for it, and never longer than the step."""
    handler = Stumbling(dict.fromkeys(range(100), 1))
    for number in range(100):
        await queue.send(number, key=f"key-{number}")

    consumer = make_consumer(handler.handle, order="skip", retries=SOON)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 100, "all are applied")

    assert sorted(await table.numbers()) == list(range(100))
    assert consumer.counters.retried == {0.02: 100}


async def test_a_confirm_that_is_lost_makes_two_copies_and_one_effect(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    handler = Stumbling({1: 1})
    async with proxied(broker) as (proxy, far):
        proxy.on_frame(Way.DOWN, Basic.Ack, 1, Act.RESET)  # the copy's confirm; consumers get no other ack
        await queue.send(1)

        consumer = Consumer(
            queue.name,
            [handler.handle],
            inbox=inbox,
            broker=far,
            failures=FailurePolicy(order="skip", retries=ONE_STEP),
            work=WorkPolicy(backoff=QUICK),
        )
        with capture_logs() as events:
            async with running(consumer):
                await eventually(lambda: consumer.counters.duplicates == 1, "both copies have come back")

    assert proxy.fired.is_set()
    assert await table.numbers() == [1]
    assert times(events, "copy.refused") == 1
    assert await queue.drained()


async def test_killed_between_the_copys_confirm_and_the_ack_it_takes_effect_once(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, tmp_path: Path, make_consumer: MakeConsumer
) -> None:
    await queue.send(BURDEN)
    async with proxied(broker) as (proxy, far):
        proxy.on_frame(Way.UP, Basic.Ack, 1, Act.HOLD)
        long = {"initial": 2.0, "maximum": 2.0, "jitter": 0.0}
        variables = environment(inbox.database, far, order="skip", retries=long)
        process = Process(COMMAND, log=tmp_path / "log", environment=variables)
        await asyncio.wait_for(proxy.fired.wait(), 20)
        process.stop(signal.SIGKILL)
        proxy.cut()

    consumer = make_consumer(count, order="skip", retries=Retries(initial=2.0))
    async with running(consumer):
        await eventually(lambda: consumer.counters.duplicates == 1, "the original and the copy have come")

    assert await table.numbers() == [BURDEN]
    assert await queue.drained()


async def test_a_retry_queue_that_is_gone_is_waited_for(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 1})
    consumer = make_consumer(handler.handle, order="skip", retries=ONE_STEP, work=WorkPolicy(backoff=QUICK))
    async with running(consumer):
        await queue.send(0)
        await eventually(lambda: consumer.counters.applied == 1, "it consumes")
        await queue.channel.queue_delete("billing.retry.50")
        with capture_logs() as events:
            await queue.send(1)
            await eventually(lambda: times(events, "copy.refused") >= 3, "it tries again and again")
        assert consumer.counters.unacknowledged == 1
        await queue.send(2)
        await eventually(lambda: consumer.counters.applied == 2, "others go on")
        await queue.channel.declare_queue("billing.retry.50", durable=True, arguments=RETRY_ARGUMENTS)
        await eventually(lambda: consumer.counters.applied == 3, "it is applied")

    assert events[-1]["error"] == "queue billing.retry.50 does not exist"
    assert await table.numbers() == [0, 2, 1]


async def test_a_retry_queue_that_is_full_gets_one_copy_once_there_is_room(
    queue: Queue, table: Table, rabbitmq: RabbitServer, broker: BrokerSettings, make_consumer: MakeConsumer
) -> None:
    """The consumer keeps the message meanwhile, tries ever more rarely, and goes on with others."""
    vhost = URL(broker.url.get_secret_value()).path.strip("/")
    rabbitmq.ctl("set_policy", "-p", vhost, "full", "retry", '{"max-length": 1}', "--apply-to", "queues")
    handler = Stumbling({0: 1})
    late = Retries(attempts=3, initial=60.0, maximum=60.0, jitter=0.0)
    consumer = make_consumer(handler.handle, order="skip", retries=late, work=WorkPolicy(backoff=QUICK))
    with capture_logs() as events:
        async with running(consumer):
            await queue.send(1)
            await eventually(lambda: consumer.counters.applied == 1, "it consumes")
            waiting = await queue.channel.declare_queue("billing.retry.60000", passive=True)

            async def count() -> int:
                declared = await queue.channel.declare_queue(waiting.name, passive=True)
                return declared.declaration_result.message_count or 0

            while await count() < 2:  # a quorum queue takes a few more than its limit
                await queue.channel.default_exchange.publish(aio_pika.Message(b"x"), waiting.name)
            await queue.send(0)
            loop = asyncio.get_running_loop()
            await eventually(lambda: times(events, "copy.refused") > 0, "it is refused")
            begun = loop.time()
            await eventually(lambda: times(events, "copy.refused") >= 6, "it tries again and again")
            assert loop.time() - begun > 0.2  # 10, 20, 40, 80 and 100 ms at least
            await queue.send(2)
            await eventually(lambda: consumer.counters.applied == 2, "others go on")
            await eventually(lambda: consumer.counters.unacknowledged == 1, "the refused one is kept")
            assert handler.calls[0] == 1
            await waiting.purge()
            await eventually(lambda: consumer.counters.unacknowledged == 0, "the copy is taken")

    assert "it is full" in next(event["error"] for event in events if event["event"] == "copy.refused")
    copy = await waiting.get(no_ack=True)
    assert copy is not None
    assert copy.body == b"0"
    assert await waiting.get(no_ack=True, fail=False) is None
    assert await table.numbers() == [1, 2]
    assert await queue.drained()


@pytest.fixture
def quick_dead_letters(rabbitmq: RabbitServer) -> Iterator[None]:
    """RabbitMQ tries the way of a dead letter again sooner than in 180 s."""
    name = "dead_letter_worker_publisher_confirm_timeout"
    usual = rabbitmq.call(f"{{ok, Timeout}} = application:get_env(rabbit, {name}), Timeout.")
    rabbitmq.call(f"application:set_env(rabbit, {name}, 500).")
    yield
    rabbitmq.call(f"application:set_env(rabbit, {name}, {usual}).")


@pytest.mark.usefixtures("quick_dead_letters")
async def test_a_work_queue_that_is_away_when_a_copy_comes_back_loses_nothing(queue: Queue) -> None:
    """The retry queue keeps what has expired, and RabbitMQ tries the way again by itself."""
    await queue.channel.declare_queue("billing.retry.50", durable=True, arguments=RETRY_ARGUMENTS)
    await queue.channel.queue_delete(queue.name)
    await queue.channel.default_exchange.publish(
        aio_pika.Message(b"7", delivery_mode=aio_pika.DeliveryMode.PERSISTENT), "billing.retry.50", mandatory=True
    )

    async def has_expired() -> bool:
        declared = await queue.channel.declare_queue("billing.retry.50", passive=True)
        return declared.declaration_result.message_count == 0

    await eventually(has_expired, "it has expired")
    await queue.declare()
    back = await queue.channel.get_queue(queue.name)

    async def is_back() -> bool:
        return await back.get(no_ack=True, fail=False) is not None

    await eventually(is_back, "it has come back")


async def test_queues_are_declared_at_the_start_and_not_at_a_reconnect(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    async with proxied(broker) as (proxy, far):
        consumer = Consumer(
            queue.name,
            [count],
            inbox=inbox,
            broker=far,
            failures=FailurePolicy(order="skip", retries=ONE_STEP),
            work=WorkPolicy(backoff=QUICK),
        )
        with capture_logs() as events:
            async with running(consumer):
                await eventually(lambda: times(events, "consumer.ready") == 1, "it is ready")
                await queue.channel.queue_delete("billing.dead")
                proxy.cut()
                await eventually(lambda: times(events, "consumer.ready") == 2, "it is ready again")

    declared = [event["name"] for event in events if event["event"] == "topology.declared"]
    assert declared == ["billing.retry.50", "billing.dead"]
    await queue.channel.declare_queue("billing.retry.50", durable=True, arguments=RETRY_ARGUMENTS)
    with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
        await queue.channel.declare_queue("billing.dead", passive=True)


async def test_without_declaring_a_missing_queue_is_told_with_its_arguments(
    queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    consumer = Consumer(
        queue.name,
        [count],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(order="skip", retries=ONE_STEP),
        declare=False,
    )

    with pytest.raises(QueueUnfitError, match=r"'billing.retry.50' does not exist: .*'x-message-ttl': 50.*") as told:
        await asyncio.wait_for(consumer.run(signals=False), 20)

    assert told.value.arguments == RETRY_ARGUMENTS


async def test_a_retry_queue_with_other_arguments_is_refused(queue: Queue, make_consumer: MakeConsumer) -> None:
    await queue.channel.declare_queue("billing.retry.50", durable=True)
    consumer = make_consumer(count, order="skip", retries=ONE_STEP)

    with pytest.raises(QueueUnfitError, match=r"billing\.retry\.50.*PRECONDITION_FAILED.*declare it, durable"):
        await asyncio.wait_for(consumer.run(signals=False), 20)
