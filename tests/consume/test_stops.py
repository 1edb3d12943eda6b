"""A consumer that is told to stop while a server is silent ends in its time, and its message comes again."""

import asyncio
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from tests.consume.effects import CONSUMER, Queue, Table
from tests.consume.sqlalchemy_handlers import engine_url
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Way

SLOW = "SELECT pg_sleep(600)"
RUNS = "SELECT FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)' AND datname = current_database()"
SOON = 9.0  # seconds; the driver alone gives a silent server 10 s, a thread waits without end


@on("Counted")
async def slowly(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute(SLOW)


@on("Counted")
def slowly_in_a_thread(message: Message, connection: psycopg.Connection) -> None:
    connection.execute(SLOW)


@on("Counted")
async def slowly_by_sqlalchemy(message: Message, connection: AsyncConnection) -> None:
    await connection.exec_driver_sql(SLOW)


@pytest.mark.parametrize("handler", [slowly, slowly_in_a_thread, slowly_by_sqlalchemy])
async def test_a_stop_beside_a_silent_database_takes_its_time_and_no_more(
    handler: Any, *, queue: Queue, table: Table, database: DatabaseSettings, broker: BrokerSettings
) -> None:
    await queue.send(1)
    async with proxied(database) as (proxy, far):
        engine = create_async_engine(engine_url(far.url.get_secret_value()))
        inbox = Inbox(engine if handler is slowly_by_sqlalchemy else far, CONSUMER)
        consumer = Consumer(queue.name, [handler], inbox=inbox, broker=broker, work=WorkPolicy(drain_timeout=0.1))
        running = asyncio.create_task(consumer.run(signals=False))
        await eventually(lambda: _runs(table), "the handler's statement runs")
        proxy.hold(Way.DOWN)

        consumer.stop()
        await eventually(running.done, "it ends", SOON)
        await engine.dispose()

    running.result()
    await eventually(lambda: _has_one(queue), "the message is in the queue again")
    assert await table.inbox_count() == 0


async def test_a_stop_beside_a_silent_broker_takes_its_time_and_no_more(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(1)
    async with proxied(broker) as (proxy, far):
        consumer = Consumer(queue.name, [slowly], inbox=inbox, broker=far, work=WorkPolicy(drain_timeout=0.1))
        running = asyncio.create_task(consumer.run(signals=False))
        await eventually(lambda: _runs(table), "the handler's statement runs")
        proxy.hold(Way.DOWN)

        consumer.stop()
        await eventually(running.done, "it ends", SOON)

    running.result()
    await eventually(lambda: _has_one(queue), "the message is in the queue again")
    assert await table.inbox_count() == 0


async def test_a_stop_during_the_start_ends_it(
    queue: Queue, database: DatabaseSettings, broker: BrokerSettings
) -> None:
    async with proxied(database) as (proxy, far):
        proxy.hold(Way.DOWN)
        consumer = Consumer(queue.name, [slowly], inbox=Inbox(far, CONSUMER), broker=broker)
        running = asyncio.create_task(consumer.run(signals=False))
        await eventually(lambda: proxy.connections > 0, "it connects")

        consumer.stop()
        await eventually(running.done, "it ends", SOON)

    running.result()


async def _runs(table: Table) -> bool:
    return bool((await table.connection.execute(RUNS)).rowcount)


async def _has_one(queue: Queue) -> bool:
    return await queue.ready_count() == 1
