"""A handler that fails loses nothing, stops nobody else, and is not called in a tight loop."""

import asyncio
import time
from typing import Any

import psycopg
import pytest

from relay.consume import Message, Retries, WorkPolicy, on
from relay.consume.classify import FailureReason
from tests.consume.effects import MakeConsumer, Queue, Stumbling, Table, count, count_together, running
from tests.consume.policies import SEVERAL_MINUTES, SOON
from tests.support.eventually import eventually

SHAPES = [
    pytest.param("hold", WorkPolicy(concurrency=2), id="two"),
    pytest.param("hold", WorkPolicy(concurrency=1, batch_size=50), id="batch"),
    pytest.param("hold", WorkPolicy(concurrency=1, batch_size=50, pipeline=True), id="pipelined-batch"),
    pytest.param("skip", WorkPolicy(concurrency=2), id="skip"),
]


@pytest.mark.parametrize(("order", "work"), SHAPES)
async def test_a_failed_message_is_tried_again_until_it_works(
    order: Any, work: WorkPolicy, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({3: 2})
    for number in range(6):
        await queue.send(number, key=f"key-{number}")

    consumer = make_consumer(handler.handle, order=order, retries=SOON, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 6, "all are applied")

    assert sorted(await table.numbers()) == list(range(6))
    assert await table.inbox_count() == 6
    assert consumer.counters.failed >= 1  # a batch that is rolled back is not counted: nobody is to blame yet
    assert await queue.drained()


@pytest.mark.parametrize(("order", "work"), SHAPES)
async def test_a_failed_message_leaves_nothing_behind_and_takes_no_place_of_the_prefetch(
    order: Any, work: WorkPolicy, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 1})
    await queue.send(1)

    consumer = make_consumer(handler.handle, order=order, retries=SEVERAL_MINUTES, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is safe elsewhere")
        assert await table.numbers() == []
        assert await table.inbox_count() == 0
        assert consumer.counters.unacknowledged == 0

    assert await queue.drained()
    assert (consumer.counters.failed, consumer.counters.applied) == (1, 0)


async def test_many_failed_messages_do_not_stop_the_others(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """Ten times as many as the consumer may have in hand."""
    handler = Stumbling(dict.fromkeys(range(20), 1))
    for number in range(40):
        await queue.send(number, key=f"key-{number}")

    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES, work=WorkPolicy(concurrency=2))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 20, "the others are applied")

    assert sorted(await table.numbers()) == list(range(20, 40))
    assert await table.held_count() == 20


@pytest.mark.parametrize(("order", "work"), SHAPES[:3])
async def test_what_comes_behind_a_failed_message_of_its_key_waits_and_other_keys_go_on(
    order: Any, work: WorkPolicy, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """In the meantime more comes of both keys, and is kept apart in the same way."""
    handler = Stumbling({0: 3})
    for number in range(8):
        await queue.send(number, key="ab"[number % 2])

    consumer = make_consumer(handler.handle, order=order, retries=SOON, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 8, "all are applied")

    assert await table.numbers("a") == [0, 2, 4, 6]
    assert await table.numbers("b") == [1, 3, 5, 7]
    assert handler.calls[0] >= 4


async def test_a_message_that_always_fails_is_not_tried_in_a_tight_loop(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """While two hundred others are applied it is tried once."""
    handler = Stumbling({0: 1_000_000})
    await queue.send(0, key="poison")
    await queue.send_all(range(1, 201), key="other")

    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES, work=WorkPolicy(concurrency=2))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 200, "the others are applied")

    assert handler.calls[0] == 1
    assert await table.numbers("other") == list(range(1, 201))


async def test_a_handler_that_is_cancelled_from_inside_has_failed(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 1}, asyncio.CancelledError())
    await queue.send(1)

    consumer = make_consumer(handler.handle, retries=SOON)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert consumer.counters.failed == 1


async def test_a_handler_may_not_commit(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    @on("Counted")
    async def commit(message: Message, connection: psycopg.AsyncConnection) -> None:
        await count(message, connection)
        await connection.commit()

    await queue.send(1)

    consumer = make_consumer(commit, retries=SEVERAL_MINUTES)
    async with running(consumer):
        await eventually(lambda: consumer.counters.failed == 1, "it failed")

    assert await table.numbers() == []


async def test_a_batch_handler_that_fails_is_called_again_with_one_message_at_a_time(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    await table.connection.execute("ALTER TABLE effect ADD CHECK (number <> 2)")
    for number in range(8):
        await queue.send(number, key=f"key-{number}")

    consumer = make_consumer(count_together, retries=SEVERAL_MINUTES, work=WorkPolicy(concurrency=1, batch_size=8))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 7 and consumer.counters.failed == 1, "all are tried")

    assert await table.numbers() == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("order", "work"), SHAPES)
async def test_a_statement_that_the_database_refuses_fails_only_its_own_message(
    order: Any, work: WorkPolicy, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    await table.connection.execute("ALTER TABLE effect ADD CHECK (number <> 2)")
    for number in range(4):
        await queue.send(number, key=f"key-{number}")

    consumer = make_consumer(count, order=order, retries=SEVERAL_MINUTES, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 3 and consumer.counters.failed == 1, "all are tried")

    assert sorted(await table.numbers()) == [0, 1, 3]
    assert await table.inbox_count() == 3


# Of the session that sleeps alone: on a busy machine others pause for as long between two statements.
HURRY = "SET LOCAL idle_in_transaction_session_timeout = '300ms'"


@on("Counted")
async def sleep_and_count(message: Message, connection: psycopg.AsyncConnection) -> None:
    if message.json() == 0:
        await connection.execute(HURRY)
        await asyncio.sleep(1)
    await count(message, connection)


@on("Counted")
async def count_and_sleep(message: Message, connection: psycopg.AsyncConnection) -> None:
    await count(message, connection)
    if message.json() == 0:
        await connection.execute(HURRY)
        await asyncio.sleep(1)


@on("Counted")
def sleep_in_a_thread(message: Message, connection: psycopg.Connection) -> None:
    if message.json() == 0:
        connection.execute(HURRY)
        time.sleep(1)
    values = (message.message_id, message.aggregate_id, message.json())
    connection.execute("INSERT INTO effect (message_id, key, number) VALUES (%s, %s, %s)", values)


@pytest.mark.parametrize(
    "handler", [sleep_and_count, count_and_sleep, sleep_in_a_thread], ids=lambda each: each.__name__
)
async def test_a_message_whose_transaction_takes_longer_than_the_server_allows_fails_alone(
    handler: Any, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    for number in range(5):
        await queue.send(number, key=f"key-{number}")

    consumer = make_consumer(handler, retries=Retries(attempts=2, initial=0.02))
    async with running(consumer):
        await eventually(
            lambda: consumer.counters.dead_letters[FailureReason.EXHAUSTED] == 1, "the one is a dead letter"
        )
        await eventually(lambda: consumer.counters.applied == 4, "the others are applied")

    (letter,) = await queue.dead()
    assert (letter.body, letter.headers["x-dead-reason"]) == (b"0", "exhausted")
    assert "idle-in-transaction timeout" in str(letter.headers["x-exception-message"])
    assert sorted(await table.numbers()) == [1, 2, 3, 4]
