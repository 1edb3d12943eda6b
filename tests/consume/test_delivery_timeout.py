"""The broker takes back a delivery that is unacknowledged for too long (`consumer_timeout`).

Up to RabbitMQ 4.2 it closes the channel for that, and counts a return. From 4.3 on it cancels the consumer.
"""

from typing import Any

import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.delivery_timeout import TIMEOUT, WORK, Hanging
from tests.consume.effects import MakeConsumer, Queue, Table, count, running
from tests.support.events import named, times
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.versions import rabbitmq_version

TRIES = 30  # of the consumer's backoff, together longer than the time-out


@pytest.fixture(scope="module")
def version(rabbitmq: RabbitServer) -> tuple[int, ...]:
    return tuple(map(int, rabbitmq_version(rabbitmq).split(".")))


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        pytest.param({}, "hold", id="shared"),
        pytest.param({}, "skip", id="skip"),
        pytest.param({"x-single-active-consumer": True}, "hold", id="single-active"),
    ],
)
async def test_a_consumer_says_that_it_timed_out_and_reads_again(
    arguments: dict[str, Any], order: str, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    await queue.channel.queue_delete(queue.name)
    await queue.declare(**arguments)
    consumer = make_consumer(Hanging().handle, work=WORK, order=order)
    await queue.send_all([1, 2])

    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 2, "both are applied")
            await eventually(lambda: not consumer.hindrances(), "it is healthy again")

    assert await table.numbers() == [1, 2]
    assert await table.begun_count() == 0
    assert (consumer.counters.failed, consumer.counters.retried.total()) == (0, 0)
    told = named(events, "consumer.timed_out")[0]  # on a busy machine the next try may time out, too
    assert told["queue"] == queue.name
    assert told["seconds"] >= TIMEOUT / 2000  # the broker counts from its sending
    assert "consumer_timeout" in told["remedy"]
    degraded = named(events, "broker.degraded")[0]
    assert degraded["reason"].startswith(f"timed out: a message of queue '{queue.name}' was unacknowledged for")
    assert await queue.drained()


@pytest.mark.usefixtures("short_timeout")
async def test_after_a_time_out_it_waits_for_the_database_before_it_reads_again(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """Else each message would come back once a time-out, which up to RabbitMQ 4.2 counts towards its limit."""
    async with proxied(inbox.database) as (proxy, far):
        consumer = Consumer(queue.name, [count], inbox=Inbox(far, inbox.consumer_name), broker=broker, work=WORK)
        with capture_logs() as events:
            async with running(consumer):
                await eventually(lambda: times(events, "consumer.ready") == 1, "it consumes")
                proxy.refusing = True
                proxy.cut()
                await queue.send(1)
                await eventually(lambda: times(events, "consumer.timed_out") == 1, "it has timed out")
                refused = proxy.refused
                await eventually(lambda: proxy.refused >= refused + TRIES, "it has asked the database many times")
                assert consumer.counters.deliveries == 1
                proxy.refusing = False
                await eventually(lambda: consumer.counters.applied == 1, "it is applied")


@pytest.mark.usefixtures("short_timeout")
async def test_time_outs_do_not_count_towards_the_delivery_limit(
    version: tuple[int, ...], queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    if version < (4, 3):
        pytest.skip("up to RabbitMQ 4.2 the end of a channel counts as a delivery, whatever has ended it")
    await queue.channel.queue_delete(queue.name)
    limited: dict[str, Any] = {"x-delivery-limit": 1}
    await queue.declare(**limited)
    handler = Hanging(calls=3)
    consumer = Consumer(queue.name, [handler.handle], inbox=inbox, broker=broker, work=WORK)
    await queue.send(1)

    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert await table.numbers() == [1]
    assert len(handler.headers) > 3
    assert {headers.get("x-delivery-count", 0) for headers in handler.headers} == {0}
