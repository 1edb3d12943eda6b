"""A consumer that is stopped lets nobody pass what it has in hand, and keeps nothing from others."""

import asyncio

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from tests.consume.effects import Queue, Table, count, running
from tests.support.eventually import eventually


@pytest.fixture(params=["quorum", "classic"])
async def single(queue: Queue, request: pytest.FixtureRequest) -> Queue:
    single = Queue(queue.channel, f"{queue.name}.single")
    await single.declare(request.param, **{"x-single-active-consumer": True})
    return single


async def test_a_stop_lets_nobody_pass_what_it_has_in_hand(
    single: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    @on("Counted")
    async def slow(message: Message, connection: psycopg.AsyncConnection) -> None:
        begun.set()
        await may_end.wait()
        await count(message, connection)

    active = Consumer(single.name, [slow], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=4))
    standby = Consumer(single.name, [count], inbox=inbox, broker=broker)
    with capture_logs() as events:
        async with running(active) as ending:
            await eventually(lambda: not active.hindrances(), "the first is the active one")
            async with running(standby):
                await eventually(lambda: not standby.hindrances(), "the second stands by")
                await single.send_all(range(10))
                await asyncio.wait_for(begun.wait(), 20)

                active.stop()
                await eventually(lambda: "consumer.draining" in [event["event"] for event in events], "it drains")
                await asyncio.sleep(0.5)  # for the broker to give the next one what is behind
                may_end.set()
                await ending
                await eventually(lambda: standby.counters.applied == 9, "the second applies the rest")

    assert await table.numbers() == list(range(10))
    assert active.counters.unacknowledged == 0
    assert active.counters.given_back == active.counters.deliveries - 1


async def test_it_takes_in_nothing_new_for_what_it_finishes(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """Other consumers of the queue get it, who work on it at once."""
    may_end = {"a": asyncio.Event(), "b": asyncio.Event()}
    begun: set[str] = set()

    @on("Counted")
    async def slow(message: Message, connection: psycopg.AsyncConnection) -> None:
        begun.add(key := message.aggregate_id or "")
        await may_end[key].wait()
        await count(message, connection)

    for number in range(6):
        await queue.send(number, key="ab"[number % 2])
    consumer = Consumer(queue.name, [slow], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=2))
    async with running(consumer) as ending:
        await eventually(lambda: len(begun) == 2, "it works on two")
        with capture_logs() as events:
            consumer.stop()
            await eventually(lambda: "consumer.draining" in [event["event"] for event in events], "it drains")

        may_end["a"].set()
        await eventually(lambda: consumer.counters.applied == 1, "one is finished")
        await asyncio.sleep(0.3)  # for the broker to give it the next
        await eventually(lambda: has_ready(queue, 4), "the others wait in the queue", within=5)
        may_end["b"].set()
        await ending

    assert sorted(await table.numbers()) == [0, 1]


async def has_ready(queue: Queue, count: int) -> bool:
    return await queue.ready_count() == count
