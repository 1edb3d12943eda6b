"""Servers that go away are waited for, and whatever was not acknowledged comes again without a second effect."""

import asyncio
import signal
from pathlib import Path

import psycopg
from pamqp.commands import Basic
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.testing.servers.process import Process
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import CONSUMER, Queue, Table, count, running
from tests.consume.policies import QUICK
from tests.consume.process import COMMAND, environment
from tests.support.events import assert_told_once, times
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way

OURS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-consumer%'"
WAITING = f"SELECT pid {OURS} AND wait_event_type = 'Lock'"


async def test_killed_between_commit_and_ack_it_takes_effect_once(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, tmp_path: Path
) -> None:
    await queue.send(1)

    async with proxied(broker) as (proxy, far):
        proxy.on_frame(Way.UP, Basic.Ack, 1, Act.HOLD)
        variables = environment(inbox.database, far)
        process = Process(COMMAND, log=tmp_path / "log", environment=variables)
        await asyncio.wait_for(proxy.fired.wait(), 20)
        assert await table.numbers() == [1]  # committed before the ack
        process.stop(signal.SIGKILL)
        proxy.cut()

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.duplicates == 1, "it came again")

    assert await table.numbers() == [1]
    assert await queue.drained()


async def test_a_lost_ack_is_a_duplicate_and_no_error(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    async with proxied(broker) as (proxy, far):
        proxy.on_frame(Way.UP, Basic.Ack, 2, Act.RESET)
        await queue.send_all(range(5))

        consumer = Consumer(
            queue.name,
            [count],
            inbox=inbox,
            broker=far,
            work=WorkPolicy(concurrency=1, backoff=QUICK),
        )
        async with running(consumer):
            await eventually(lambda: sum_of(consumer) == 6, "all are settled")

    assert proxy.fired.is_set()
    assert await table.numbers() == list(range(5))
    assert (consumer.counters.duplicates, consumer.counters.failed) == (1, 0)


async def test_sigterm_lets_the_running_transaction_finish(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    await queue.send_all(range(3))
    async with await psycopg.AsyncConnection.connect(inbox.database.url.get_secret_value()) as other:
        await other.execute("LOCK TABLE effect IN EXCLUSIVE MODE")
        process = Process(COMMAND, log=log, environment=environment(inbox.database, broker))
        await eventually(lambda: has_waiting_handler(table), "the handler waits for the lock")

        ending = asyncio.create_task(asyncio.to_thread(process.stop, signal.SIGTERM))
        await eventually(lambda: "consumer.draining" in log.read_text(), "it takes no more deliveries")
        await other.rollback()
        await ending

    assert process.returncode == 0
    assert await table.numbers() == [0]
    await eventually(lambda: has_ready(queue, 2), "the others are in the queue again")
    assert '"applied": 1' in log.read_text().splitlines()[-1]


async def test_a_transaction_that_outlives_the_drain_is_rolled_back_and_comes_again(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(1)
    async with await psycopg.AsyncConnection.connect(inbox.database.url.get_secret_value()) as other:
        await other.execute("LOCK TABLE effect IN EXCLUSIVE MODE")
        consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(drain_timeout=0.1))
        async with running(consumer):
            await eventually(lambda: has_waiting_handler(table), "the handler waits for the lock")
        await other.rollback()

    assert await table.numbers() == []
    await eventually(lambda: has_ready(queue, 1), "the message is in the queue again")


async def test_a_second_stop_does_not_wait_for_the_running_transaction(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(1)
    async with await psycopg.AsyncConnection.connect(inbox.database.url.get_secret_value()) as other:
        await other.execute("LOCK TABLE effect IN EXCLUSIVE MODE")
        consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(drain_timeout=600))
        async with running(consumer) as task:
            await eventually(lambda: has_waiting_handler(table), "the handler waits for the lock")
            consumer.stop()
            consumer.stop()
            await asyncio.wait_for(asyncio.shield(task), 20)
        await other.rollback()

    assert await table.numbers() == []


async def test_connections_closed_by_the_broker_are_opened_again(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, rabbitmq: RabbitServer
) -> None:
    await queue.send_all(range(300))

    with capture_logs() as events:
        consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied > 20, "some are applied")
            # Not by rabbitmqctl, which would take longer to start than the consumer needs for all of them.
            rabbitmq.call('rabbit_networking:close_all_user_connections(<<"relay">>, <<"test">>).')
            await eventually(lambda: consumer.counters.applied == 300, "all are applied")

    assert await table.numbers() == list(range(300))
    assert [event["event"] for event in events].count("consumer.ready") == 2
    assert_told_once(events, "broker")


async def test_a_broker_that_is_away_is_waited_for(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(1)
    async with proxied(broker) as (proxy, far):
        consumer = Consumer(
            queue.name,
            [count],
            inbox=inbox,
            broker=far,
            work=WorkPolicy(concurrency=1, backoff=QUICK),
        )
        with capture_logs() as events:
            async with running(consumer):
                await eventually(lambda: consumer.counters.applied == 1, "the first is applied")
                proxy.refusing = True
                proxy.cut()
                await eventually(lambda: proxy.refused >= 5, "it has tried several times")
                proxy.refusing = False
                await queue.send(2)
                await eventually(lambda: consumer.counters.applied == 2, "the second is applied")

    assert await table.numbers() == [1, 2]
    assert_told_once(events, "broker")


async def test_a_queue_that_was_deleted_is_waited_for(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(1)
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "the first is applied")
        with capture_logs() as events:
            await queue.channel.queue_delete(queue.name)
            await eventually(lambda: times(events, "broker.degraded") == 1, "it has noticed")
        await queue.declare()
        await queue.send(2)
        await eventually(lambda: consumer.counters.applied == 2, "the second is applied")


async def test_database_sessions_that_are_ended_are_opened_again(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send_all(range(300))

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(batch_size=7, backoff=QUICK))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied > 20, "some are applied")
        await table.end_sessions()
        await eventually(lambda: sum_of(consumer) == 300, "all are settled")

    assert await table.numbers() == list(range(300))
    assert consumer.counters.failed == 0


async def test_a_database_that_is_away_is_told_once_by_all_connections_together(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    async with proxied(inbox.database) as (proxy, far):
        consumer = Consumer(
            queue.name, [count], inbox=Inbox(far, CONSUMER), broker=broker, work=WorkPolicy(backoff=QUICK)
        )
        with capture_logs() as events:
            async with running(consumer):
                await queue.send_all(range(8))
                await eventually(lambda: sum_of(consumer) == 8, "it works")
                proxy.refusing = True
                proxy.cut()
                await queue.send_all(range(8, 16))
                await eventually(lambda: proxy.refused >= 20, "each connection has tried several times")
                proxy.refusing = False
                await eventually(lambda: sum_of(consumer) == 16, "all are settled")
                await eventually(lambda: "database" not in consumer.hindrances(), "all connections are well")

    assert_told_once(events, "database")


async def test_an_unanswered_commit_is_repeated_and_takes_effect_once(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """The server has committed, or not: we cannot know, and need not."""
    await queue.send(1)
    async with proxied(inbox.database, command_timeout=2.0) as (proxy, far):

        @on("Counted")
        async def then_silence(message: Message, connection: psycopg.AsyncConnection) -> None:
            await count(message, connection)
            if not silenced.is_set():
                silenced.set()
                proxy.hold(Way.DOWN)

        silenced = asyncio.Event()
        consumer = Consumer(
            queue.name,
            [then_silence],
            inbox=Inbox(far, inbox.consumer_name),
            broker=broker,
            work=WorkPolicy(backoff=QUICK),
        )
        with capture_logs() as events:
            async with running(consumer):
                await asyncio.wait_for(silenced.wait(), 20)
                before = proxy.connections
                await eventually(lambda: proxy.connections > before, "it gave up and asks the server to cancel")
                proxy.cut()
                proxy.release(Way.DOWN)
                await eventually(lambda: sum_of(consumer) == 1, "it is settled")
                await eventually(lambda: "database" not in consumer.hindrances(), "all connections are well")

    assert await table.numbers() == [1]
    assert consumer.counters.duplicates == 1
    assert_told_once(events, "database")


async def test_a_handler_that_gives_up_a_silent_database_has_not_failed(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """psycopg closes the connection then, as a handler could by `connection.pgconn.finish()`."""
    await queue.send(1)
    async with proxied(inbox.database) as (proxy, far):
        finished: list[bool] = []

        @on("Counted")
        async def impatient(message: Message, connection: psycopg.AsyncConnection) -> None:
            if not finished:
                proxy.hold(Way.DOWN)
                try:
                    async with asyncio.timeout(0.2):
                        await connection.execute("SELECT 1")
                finally:
                    finished.append(connection.pgconn.pgconn_ptr is None)  # type: ignore[attr-defined]
                    proxy.cut()
                    proxy.release(Way.DOWN)
            await count(message, connection)

        consumer = Consumer(
            queue.name,
            [impatient],
            inbox=Inbox(far, inbox.consumer_name),
            broker=broker,
            work=WorkPolicy(backoff=QUICK),
        )
        async with running(consumer):
            await eventually(lambda: sum_of(consumer) == 1, "it is settled")

    assert finished == [True]
    assert await table.numbers() == [1]
    assert consumer.counters.failed == 0


async def test_a_delivery_that_is_taken_back_from_a_running_handler_takes_effect_once(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """The next one that gets it waits at the inbox for the first, which commits and cannot acknowledge any more."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    @on("Counted")
    async def slow(message: Message, connection: psycopg.AsyncConnection) -> None:
        begun.set()
        await may_end.wait()
        await count(message, connection)

    async with proxied(broker) as (proxy, far):
        first = Consumer(
            queue.name,
            [slow],
            inbox=inbox,
            broker=far,
            work=WorkPolicy(backoff=QUICK, drain_timeout=60),
        )
        second = Consumer(queue.name, [count], inbox=inbox, broker=broker)
        async with running(first):
            await queue.send(1)
            await asyncio.wait_for(begun.wait(), 20)
            proxy.refusing = True
            proxy.cut()
            async with running(second):
                await eventually(lambda: has_waiting_handler(table), "the second waits at the inbox")
                may_end.set()
                await eventually(lambda: second.counters.duplicates == 1, "it is a duplicate there")
            proxy.refusing = False

    assert await table.numbers() == [1]
    assert (first.counters.applied, second.counters.applied) == (1, 0)
    assert await queue.drained()


def sum_of(consumer: Consumer) -> int:
    return consumer.counters.applied + consumer.counters.duplicates


async def has_waiting_handler(table: Table) -> bool:
    cursor = await table.connection.execute(WAITING)
    return bool(await cursor.fetchall())


async def has_ready(queue: Queue, count: int) -> bool:
    return await queue.ready_count() == count
