"""A consumer in a block of an application: ready in it, drained at its end; and several consumers at once."""

import asyncio

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Backoff, Consumer, Inbox, Message, WorkPolicy, on, run_all
from relay.consume.lifecycle import RunsInBlock
from relay.consume.pool import PartitionedConsumer
from relay.errors import BrokerUnavailableError, QueueMissingError, UsageError
from relay.runtime.hindrance import Hindrance
from relay.testing.servers.process import free_port
from tests.consume.effects import MakeConsumer, Queue, Table, count, running
from tests.support.eventually import eventually
from tests.support.proxied import proxied, with_port
from tests.support.proxy import FaultProxy

OFTEN = WorkPolicy(backoff=Backoff(0.05, 0.1))
KINDS = [Consumer, PartitionedConsumer]


async def test_it_is_ready_in_the_block_and_drained_at_its_end(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer(count)
    async with consumer as ready:
        assert ready is consumer
        assert consumer.hindrances() == {}
        await queue.send_all(range(5))
        await eventually(lambda: consumer.counters.applied == 5, "all are applied")

    assert await table.numbers() == list(range(5))
    assert await queue.drained()


async def test_what_is_missing_at_the_start_is_raised_before_the_block(inbox: Inbox, broker: BrokerSettings) -> None:
    with pytest.raises(QueueMissingError):
        async with Consumer("nowhere", [count], inbox=inbox, broker=broker):
            pytest.fail("the block has begun")


async def test_an_error_of_the_block_is_raised_and_the_consumer_stopped(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with make_consumer(count):
            raise ZeroDivisionError

    assert await queue.drained()


async def test_a_consumer_runs_in_one_block_only(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(count)
    async with consumer:
        with pytest.raises(UsageError, match="make another one for another block"):
            await consumer.__aenter__()
        assert consumer.hindrances() == {}
    with pytest.raises(UsageError, match="make another one for another block"):
        await consumer.__aenter__()

    stopped = make_consumer(count)
    stopped.stop()
    with pytest.raises(UsageError, match="stopped before it was ready"):
        await stopped.__aenter__()


async def test_a_block_that_has_stopped_it_still_waits_for_what_is_under_way(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def wait(message: Message, connection: psycopg.AsyncConnection) -> None:
        began.set()
        await goes_on.wait()
        await count(message, connection)

    consumer = make_consumer(on("Counted")(wait))
    await consumer.__aenter__()
    await queue.send(7)
    await began.wait()
    consumer.stop()
    ending = asyncio.create_task(consumer.__aexit__(None, None, None))
    await asyncio.sleep(0.1)
    assert not ending.done()
    goes_on.set()
    await ending

    assert await table.numbers() == [7]


async def test_a_cancel_of_the_block_drains(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(count)
    ready = asyncio.Event()

    async def serve() -> None:
        async with consumer:
            ready.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await ready.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving

    assert await queue.drained()


async def test_several_run_until_each_is_stopped(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    consumers = [make_consumer(count), make_consumer(count)]
    running = asyncio.create_task(run_all(*consumers, signals=False))
    await eventually(lambda: not any(each.hindrances() for each in consumers), "both are ready")
    await queue.send_all(range(5))
    await eventually(lambda: sum(each.counters.applied for each in consumers) == 5, "all are applied")

    consumers[0].stop()
    await asyncio.sleep(0.1)
    assert not running.done()
    consumers[1].stop()
    await running

    assert sorted(await table.numbers()) == list(range(5))


async def test_one_that_ends_by_an_error_ends_the_others(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, make_consumer: MakeConsumer
) -> None:
    with pytest.raises(QueueMissingError):
        await run_all(make_consumer(count), Consumer("nowhere", [count], inbox=inbox, broker=broker), signals=False)

    assert await queue.drained()


class Failing(RunsInBlock):
    """Works until it is told to stop or to fail, and ends by an error."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def run(self, *, signals: bool | None = None) -> None:  # noqa: ARG002  (as the base has it)
        await self.told.wait()
        raise ArithmeticError

    def stop(self) -> None:
        self.told.set()

    @property
    def is_stopping(self) -> bool:
        return self.told.is_set()

    def hindrances(self) -> dict[str, Hindrance]:
        return {}


async def test_without_consumers_there_is_nothing_to_run() -> None:
    with pytest.raises(UsageError, match="at least one consumer"):
        await run_all()


async def test_errors_of_several_are_raised_together() -> None:
    first, second = Failing(), Failing()
    first.stop()
    with pytest.raises(ExceptionGroup, match="several consumers") as raised:
        await run_all(first, second)

    assert [type(each) for each in raised.value.exceptions] == [ArithmeticError, ArithmeticError]


async def test_an_error_that_ends_it_in_the_block_is_logged_at_once_and_raised_at_the_end() -> None:
    consumer = Failing()
    with capture_logs() as events:
        await consumer.__aenter__()
        consumer.told.set()
        await eventually(lambda: [each["event"] for each in events] == ["consumer.failed"], "it is logged")
    with pytest.raises(ArithmeticError):
        await consumer.__aexit__(None, None, None)


async def wait_for_late(consumer: Consumer | PartitionedConsumer, proxy: FaultProxy) -> None:
    """Run a consumer whose server refuses at first, until it is ready."""
    proxy.refusing = True
    with capture_logs() as events:
        async with running(consumer) as ending:
            await eventually(lambda: "consumer.waiting" in [each["event"] for each in events], "it waits")
            assert not ending.done()
            proxy.refusing = False
            await eventually(lambda: not consumer.hindrances(), "it is ready")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_broker_that_comes_up_late_is_waited_for(
    kind: type[Consumer | PartitionedConsumer], queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    async with proxied(broker) as (proxy, behind):
        consumer = kind(queue.name, [count], inbox=inbox, broker=behind, work=OFTEN, start_timeout=60)
        await wait_for_late(consumer, proxy)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_database_that_comes_up_late_is_waited_for(
    kind: type[Consumer | PartitionedConsumer],
    queue: Queue,
    table: Table,
    database: DatabaseSettings,
    broker: BrokerSettings,
) -> None:
    async with proxied(database) as (proxy, behind):
        inbox = Inbox(behind, "projection")
        consumer = kind(queue.name, [count], inbox=inbox, broker=broker, work=OFTEN, start_timeout=60)
        await wait_for_late(consumer, proxy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seconds", [0, 0.2])
async def test_a_server_that_does_not_come_up_in_time_ends_it(
    kind: type[Consumer | PartitionedConsumer], seconds: float, queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    nowhere = with_port(broker, free_port())
    consumer = kind(queue.name, [count], inbox=inbox, broker=nowhere, start_timeout=seconds)

    with pytest.raises(BrokerUnavailableError, match="Connect call failed"):
        await consumer.run(signals=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_ends_the_waiting(
    kind: type[Consumer | PartitionedConsumer], queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    nowhere = with_port(broker, free_port())
    consumer = kind(queue.name, [count], inbox=inbox, broker=nowhere, start_timeout=3600)
    running = asyncio.create_task(consumer.run(signals=False))
    await asyncio.sleep(0.3)

    consumer.stop()

    await asyncio.wait_for(running, 20)
