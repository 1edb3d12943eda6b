"""An overload pauses everything, one try at a time asks whether it is over, and nobody's attempt is burnt."""

import asyncio
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Overload, Retries, WorkPolicy, on
from relay.consume.apply.fence import Fence
from tests.consume.effects import QUEUE, MakeConsumer, Queue, Stumbling, Table, count, running
from tests.consume.policies import QUICK
from tests.support.events import times
from tests.support.eventually import eventually
from tests.support.proxied import proxied

ONCE = Retries(attempts=1)


class Service:
    """Something that all handlers need, which has too much to do until it is told otherwise."""

    def __init__(self) -> None:
        self.is_overloaded = True
        self.calls = 0
        self.together = 0
        self.most_together = 0

        @on("Counted")
        async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
            self.calls += 1
            self.together += 1
            self.most_together = max(self.most_together, self.together)
            try:
                await asyncio.sleep(0.01)
                if self.is_overloaded:
                    raise Overload("429")
                await count(message, connection)
            finally:
                self.together -= 1

        self.handle = handle


@pytest.mark.parametrize("order", ["hold", "skip"])
async def test_one_at_a_time_asks_and_its_success_resumes_all(
    order: Any, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    service = Service()
    for number in range(40):
        await queue.send(number, key=f"key-{number}")

    # One attempt burnt would be a dead letter.
    consumer = make_consumer(service.handle, order=order, retries=ONCE, work=WorkPolicy(concurrency=5, backoff=QUICK))
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.overloads >= 5, "it is paused")
            service.most_together = 0
            await eventually(lambda: consumer.counters.overloads >= 10, "it asks again and again")
            assert service.most_together == 1
            assert consumer.counters.acknowledged == 0
            assert consumer.counters.unacknowledged == consumer.prefetch
            service.is_overloaded = False
            await eventually(lambda: consumer.counters.applied == 40, "all are applied")

    assert sorted(await table.numbers()) == list(range(40))
    assert service.most_together > 1  # all work again
    assert (consumer.counters.failed, consumer.counters.dead_letters.total()) == (0, 0)
    assert consumer.counters.paused_seconds > 0
    assert times(events, "consumer.resumed") == 1
    waits = [event["probe_in_s"] for event in events if event["event"] == "consumer.paused"]
    assert max(waits[5:]) > waits[0]


async def test_an_overloads_messages_that_come_again_burn_nothing(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """The broker takes deliveries back that nobody settles for half an hour, and gives them again."""
    service = Service()
    await queue.send(1)
    async with proxied(broker) as (proxy, far):
        consumer = Consumer(
            queue.name,
            [service.handle],
            inbox=inbox,
            broker=far,
            failures=FailurePolicy(retries=ONCE, poison_limit=3),
            work=WorkPolicy(backoff=QUICK),
        )
        async with running(consumer):
            for times in range(1, 7):
                seen = service.calls
                await eventually(lambda: service.calls > seen, "it asks")  # noqa: B023
                proxy.cut()
                await eventually(lambda: consumer.counters.redeliveries >= times, "it came again")  # noqa: B023
            service.is_overloaded = False
            await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert await table.numbers() == [1]
    assert consumer.counters.dead_letters.total() == 0


async def test_a_held_head_asks_too_when_nothing_else_comes(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 1})
    await queue.send(1)
    soon = Retries(attempts=2, initial=0.02, maximum=0.02)
    consumer = make_consumer(handler.handle, retries=soon, work=WorkPolicy(backoff=QUICK))
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is held")
        handler._error, handler.failures[1] = Overload("429"), 5
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert consumer.counters.overloads >= 1
    assert consumer.counters.dead_letters.total() == 0


async def test_a_consumer_that_is_paused_stops_at_once(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    service = Service()
    await queue.send_all(range(5))
    consumer = make_consumer(service.handle, work=WorkPolicy(backoff=QUICK, drain_timeout=600))
    async with running(consumer) as task:
        await eventually(lambda: consumer.counters.overloads >= 3, "it is paused")
        consumer.stop()
        await asyncio.wait_for(asyncio.shield(task), 20)

    assert await table.numbers() == []


async def test_an_outage_that_a_handler_runs_into_burns_nothing(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 3}, psycopg.errors.DiskFull("no space left on device"))
    await queue.send(1)
    consumer = make_consumer(handler.handle, retries=ONCE, work=WorkPolicy(backoff=QUICK))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert handler.calls[1] == 4
    assert (consumer.counters.failed, consumer.counters.dead_letters.total()) == (0, 0)


async def test_a_database_that_takes_no_writes_is_waited_for(
    queue: Queue, table: Table, inbox: Inbox, make_consumer: MakeConsumer
) -> None:
    """Its sessions stay open: a full disk, or a primary that no longer is one."""
    await queue.send_all(range(5))
    name = inbox.database.url.get_secret_value().rpartition("/")[2].partition("?")[0]
    with capture_logs() as events:
        consumer = make_consumer(count, retries=ONCE, work=WorkPolicy(backoff=QUICK))
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 5, "it works")
            await table.connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
            await table.connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'outbox-consumer%'"
            )
            await queue.send_all(range(5, 10))
            await eventually(lambda: any("read-only" in str(event.get("reason")) for event in events), "it is refused")
            await table.connection.execute("SET default_transaction_read_only = off")
            await table.connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
            await table.connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'outbox-consumer%'"
            )
            await eventually(lambda: consumer.counters.applied == 10, "all are applied")

    assert await table.numbers() == list(range(10))
    assert (consumer.counters.failed, consumer.counters.held) == (0, 0)


async def test_a_pause_of_a_pool_is_no_stall_of_its_partitions(inbox: Inbox, broker: BrokerSettings) -> None:
    setup = Consumer(QUEUE, [Service().handle], inbox=inbox, broker=broker, work=WorkPolicy(stall_after=30)).setup
    partition = setup.of(Fence(0, 1), f"{QUEUE}.00")
    partition.counters.in_flight = 1
    partition.stalls.look(0)
    setup.gate.pause("429")

    partition.stalls.look(100)

    assert partition.stalls.reason is None
