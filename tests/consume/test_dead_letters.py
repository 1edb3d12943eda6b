"""What cannot be applied goes to the dead letters with the reason, and is acknowledged once the broker has it there."""

import socket
from datetime import UTC, datetime
from typing import Any

import aio_pika
import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Permanent, WorkPolicy, on
from tests.consume.effects import MakeConsumer, Queue, Stumbling, Table, count, running
from tests.consume.policies import ORDERS, QUICK, SOON
from tests.support.events import times
from tests.support.eventually import eventually


@pytest.mark.parametrize("order", ORDERS)
async def test_a_permanent_failure_is_a_dead_letter_at_once(
    order: dict[str, Any], queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    message_id = await queue.send(1)
    handler = Stumbling({1: 1}, Permanent("the invoice was cancelled\nwith secrets"))

    consumer = make_consumer(handler.handle, **order)
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters["permanent"] == 1, "it is a dead letter")
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is acknowledged")

    (letter,) = await queue.dead()
    assert (letter.message_id, letter.body, letter.type) == (message_id, b"1", "Counted")
    headers = letter.headers
    assert headers["x-dead-reason"] == "permanent"
    assert headers["x-dead-attempts"] == 1
    assert headers["x-exception"] == "relay.consume.classify.Permanent"
    assert headers["x-exception-message"] == "the invoice was cancelled"
    assert (headers["x-consumer"], headers["x-host"]) == ("projection", socket.gethostname())
    assert (headers["x-original-exchange"], headers["x-original-routing-key"]) == ("", "billing")
    assert headers["x-aggregate-id"] == "a"
    assert datetime.fromisoformat(str(headers["x-first-failure"])) <= datetime.now(UTC)
    assert handler.calls[1] == 1
    assert await table.numbers() == []
    assert await table.held_count() == 0
    assert await queue.drained()


@pytest.mark.parametrize("order", ORDERS)
async def test_it_is_a_dead_letter_when_it_has_failed_as_often_as_it_may(
    order: dict[str, Any], queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    await queue.send(1)
    handler = Stumbling({1: 100})

    consumer = make_consumer(handler.handle, retries=SOON, **order)
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters["exhausted"] == 1, "it is a dead letter")

    (letter,) = await queue.dead()
    assert handler.calls[1] == SOON.attempts
    assert letter.headers["x-dead-attempts"] == SOON.attempts
    assert str(letter.headers["x-first-failure"]) < str(letter.headers["x-last-failure"])
    assert "x-retry-attempts" not in letter.headers


@on("Typed")
async def take_text(message: Message[str], connection: psycopg.AsyncConnection) -> None:
    raise AssertionError(f"not called with {message.payload}")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("sent", "reason", "words"),
    [
        ({"event_type": "Renamed"}, "unhandled", "type 'Renamed' has no handler"),
        ({"message_id": "seven"}, "invalid", "its message_id 'seven' is no UUID"),
        (
            {"event_type": "Typed"},
            "invalid",
            "Typed {}: the body does not fit what its handler takes: body: string_type",
        ),
    ],
)
async def test_a_message_that_nobody_can_apply_stops_nobody(
    order: dict[str, Any],
    sent: dict[str, Any],
    reason: str,
    words: str,
    *,
    queue: Queue,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
) -> None:
    message_id = await queue.send(1, **sent)
    await queue.send(2)

    consumer = Consumer(queue.name, [count, take_text], inbox=inbox, broker=broker, failures=FailurePolicy(**order))
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters[reason] == 1, "it is a dead letter")
        await eventually(lambda: consumer.counters.applied == 1, "the other is applied")

    (letter,) = await queue.dead()
    assert (letter.message_id, letter.headers["x-dead-reason"]) == (message_id, reason)
    assert letter.headers["x-exception-message"] == words.format(message_id)
    assert await table.numbers() == [2]
    assert await queue.drained()


async def test_a_dead_letter_sent_back_is_tried_anew(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    await queue.send(1)
    handler = Stumbling({1: 5})

    consumer = make_consumer(handler.handle, order="skip", retries=SOON)
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters["exhausted"] == 1, "it is a dead letter")
        (letter,) = await queue.dead()
        await queue.channel.default_exchange.publish(letter, queue.name)
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert handler.calls[1] == SOON.attempts + 2


@pytest.mark.parametrize("order", ORDERS)
async def test_while_the_dead_letters_refuse_nothing_is_dropped_and_others_go_on(
    order: dict[str, Any], queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """The queue is full: the operator's limit, not ours."""
    full: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "reject-publish"}
    await queue.channel.declare_queue("billing.dead", durable=True, arguments=full)

    async def fill() -> None:  # a quorum queue takes a few more than its limit
        message = aio_pika.Message(b"x")
        while await queue.dead_count() < 2:
            await queue.channel.default_exchange.publish(message, "billing.dead", mandatory=True)

    await fill()
    handler = Stumbling({0: 1, 1: 1}, Permanent("no"))
    consumer = make_consumer(handler.handle, work=WorkPolicy(backoff=QUICK, concurrency=3), **order)
    with capture_logs() as events:
        async with running(consumer):
            await queue.send(0, key="a")
            await eventually(lambda: times(events, "copy.refused") >= 2, "it is refused")
            await queue.send(2, key="b")
            await eventually(lambda: consumer.counters.applied == 1, "others go on")
            assert consumer.counters.dead_letters.total() == 0
            await eventually(lambda: consumer.counters.unacknowledged + consumer.counters.held == 1, "it is kept")
            taken = await queue.dead()  # the letter may come while the others are taken out
            await eventually(lambda: consumer.counters.dead_letters["permanent"] == 1, "it is a dead letter")

    assert "it is full" in next(event["error"] for event in events if event["event"] == "copy.refused")
    taken += await queue.dead()
    assert [letter.body for letter in taken if letter.body != b"x"] == [b"0"]


async def test_what_the_broker_gives_up_lands_there_too_when_the_queue_says_so(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """As docs/consumer.md tells to set: here a delivery limit of 1."""
    queue.name = "limited"
    given_up: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "limited.dead"}
    await queue.declare(**{"x-delivery-limit": 1, **given_up})
    consumer = make_consumer(count)
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: times(events, "consumer.ready") == 1, "it has declared the dead letters")
    await queue.send(1)
    source = await queue.channel.get_queue(queue.name)
    for _ in range(2):
        message = await source.get()
        await message.reject(requeue=True)

    async def is_dead() -> bool:
        return await queue.dead_count() == 1

    await eventually(is_dead, "it is a dead letter")


async def test_a_handlers_database_error_shows_no_values(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    await table.connection.execute("CREATE UNIQUE INDEX ON effect (number)")

    @on("Counted")
    async def twice(message: Message, connection: psycopg.AsyncConnection) -> None:
        await count(message, connection)
        await count(message, connection)

    await queue.send(1_234_567_890)  # which is in no random id
    consumer = make_consumer(twice, permanent_on=[psycopg.errors.UniqueViolation])
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.dead_letters["permanent"] == 1, "it is a dead letter")

    (letter,) = await queue.dead()
    assert "duplicate key" in str(letter.headers["x-exception-message"])
    assert "1234567890" not in str(letter.headers) + str(events)
