"""A free worker takes what waits; messages of one key are never with two."""

import asyncio

import psycopg
import pytest

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.consume.worker import KeyQueue
from relay.runtime.backoff import Stopping
from tests.consume.effects import Queue, Table, count, delivered, running
from tests.support.eventually import eventually


async def test_a_slow_key_holds_up_nobody_else(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """Of two workers one is at it all the time; by a hash of the key half of the others would wait behind it."""
    may_end = asyncio.Event()

    @on("Counted")
    async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
        if message.aggregate_id == "slow":
            await may_end.wait()
        await count(message, connection)

    await queue.send(0, key="slow")
    for number in range(1, 20):
        await queue.send(number, key=f"key-{number}")

    consumer = Consumer(queue.name, [handle], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=2))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 19, "the others are applied")
        may_end.set()
        await eventually(lambda: consumer.counters.applied == 20, "all are applied")

    assert await table.numbers() == [*range(1, 20), 0]


async def test_a_key_is_with_one_until_it_is_done() -> None:
    key_queue = KeyQueue()
    for number, key in enumerate("aabac"):
        key_queue.put(delivered(number, key=key))

    first = await key_queue.take(1)
    second = await key_queue.take(10)
    assert [each.tag for each in first] == [0]
    assert [each.tag for each in second] == [2, 4]

    key_queue.done(first)
    assert [each.tag for each in await key_queue.take(10)] == [1, 3]


async def test_what_is_given_back_comes_first_again_in_its_order() -> None:
    key_queue = KeyQueue()
    for number, key in enumerate("aabab"):
        key_queue.put(delivered(number, key=key))
    batch = await key_queue.take(4)
    key_queue.put(delivered(5, key="a"))

    key_queue.give_back([each for each in batch if each.tag != 1])
    key_queue.done(batch)

    assert [each.tag for each in await key_queue.take(10)] == [0, 2, 3, 4, 5]


async def test_a_batch_is_in_the_order_of_delivery() -> None:
    key_queue = KeyQueue()
    for number, key in enumerate("abab"):
        key_queue.put(delivered(number, key=key))

    assert [each.tag for each in await key_queue.take(10)] == [0, 1, 2, 3]


async def test_a_key_with_much_to_do_takes_turns_with_the_others() -> None:
    key_queue = KeyQueue()
    for number, key in enumerate("aaaab"):
        key_queue.put(delivered(number, key=key))

    first = await key_queue.take(2)
    key_queue.done(first)
    assert [each.key for each in await key_queue.take(1)] == ["b"]


async def test_nothing_is_kept_of_a_key_that_is_done() -> None:
    key_queue = KeyQueue()
    key_queue.put(delivered(1))

    key_queue.done(await key_queue.take(1))

    assert not key_queue._waiting


async def test_all_who_wait_and_all_who_come_are_let_go_when_all_stops() -> None:
    key_queue = KeyQueue()
    waiting = [asyncio.create_task(key_queue.take(1)) for _ in range(3)]
    await asyncio.sleep(0)

    key_queue.stop()
    key_queue.put(delivered(1))

    for each in (*waiting, key_queue.take(1)):
        with pytest.raises(Stopping):
            await each
