"""Eleven causes: what the overview says of each, and how few clicks are between it and the repair.

Servers are real, and of this file alone: it stops them. Relays are processes. `python -m tests.console.walks` prints
the table of docs/console.md.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import LiteralString

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractChannel
from playwright.async_api import Browser

from relay.config.settings import BrokerSettings, DatabaseSettings, Settings
from relay.consume import Message, Permanent, WorkPolicy, on
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import Process
from relay.testing.servers.rabbitmq import RabbitServer
from tests.console.walks.walk import EVENT_TYPE, EXCHANGE, ROUTING_KEY, Walk, walking
from tests.console.windows import NEEDS_CHROMIUM
from tests.consume.conftest import inbox, make_consumer, queue, table
from tests.consume.effects import QUEUE, MakeConsumer, Queue, Stumbling, Table, count, count_together, running
from tests.consume.policies import SEVERAL_MINUTES
from tests.consume.process import COMMAND, environment
from tests.faults.alarms import Alarm
from tests.http.conftest import RelayProcess, StartRelay
from tests.prose.pages import ROOT
from tests.support.eventually import eventually
from tests.support.queues import keep_queues

__all__ = ["inbox", "make_consumer", "queue", "table"]  # fixtures

pytestmark = [NEEDS_CHROMIUM, pytest.mark.timeout(400)]

WalkFrom = Callable[[], AbstractAsyncContextManager[Walk]]
MAX_BYTES = 1_000
MANY = 15_000  # so that 10,000 wait behind those that the consumer has in hand
WRITE: LiteralString = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)
    SELECT 'counter', number::text, %s, to_json(number), %s, %s FROM generate_series(1, %s) AS number
"""
WRITE_LARGE: LiteralString = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)
    VALUES ('counter', '1', %s, (repeat(' ', %s) || 1)::json, %s, %s)
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitServer]:
    with RabbitServer(schedulers=1) as node:
        yield node


@pytest.fixture
async def channel(queue: Queue) -> AbstractChannel:
    """A channel of a broker that has what the console's settings list."""
    exchange = await queue.channel.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
    await (await queue.channel.get_queue(QUEUE)).bind(exchange, ROUTING_KEY)
    return queue.channel


@pytest.fixture
async def relay(start_relay: StartRelay, channel: AbstractChannel) -> RelayProcess:
    """`relay run`, with the settings of a production."""
    return await ready(start_relay())


@pytest.fixture
def walk_from(chromium: Browser, settings: Settings, record_property: Callable[[str, object], None]) -> WalkFrom:
    """`async with walk_from() as walk:` begins and ends on an overview where all is well."""
    return partial(walking, chromium, settings, record_property)


StartWorker = Callable[[], Process]


@pytest.fixture
def start_worker(database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path) -> Iterator[StartWorker]:
    """Start the consumer as a separate process."""
    started: list[Process] = []

    def start() -> Process:
        log = tmp_path / f"worker-{len(started)}.log"
        started.append(Process(COMMAND, log=log, environment=environment(database, broker), folder=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.stop(signal.SIGKILL)


async def ready(relay: RelayProcess) -> RelayProcess:
    await relay.wait_for_log("relay.ready")
    return relay


def write(url: str, number: int) -> None:
    """Write a row for each key, 1 and up."""
    with psycopg.connect(url) as connection:
        connection.execute(WRITE, [EVENT_TYPE, EXCHANGE, ROUTING_KEY, number])


async def applies(table: Table, number: int) -> None:
    """Wait until the consumer has applied what `write` wrote, each row once."""

    async def does() -> bool:
        return sorted(await table.numbers()) == [*range(1, number + 1)]

    await eventually(does, f"{number} are applied", 120)


async def test_a_missing_route_is_declared(
    walk_from: WalkFrom,
    database_url: str,
    relay: RelayProcess,
    channel: AbstractChannel,
    table: Table,
    make_consumer: MakeConsumer,
) -> None:
    async with running(make_consumer(count)), walk_from() as walk:
        await (await channel.get_queue(QUEUE)).unbind(EXCHANGE, ROUTING_KEY)
        walk.begin("route missing")
        write(database_url, 1)
        await walk.sees("does not work")
        await walk.follow("See the route, and try it")
        await walk.follow("Compare with relay.toml")
        await walk.fill("Why", "the binding was deleted")
        await walk.press("Declare what is missing")

        await applies(table, 1)


async def test_a_refused_row_is_retried_once_the_limit_is_raised(
    walk_from: WalkFrom,
    database_url: str,
    channel: AbstractChannel,
    start_relay: StartRelay,
    table: Table,
    make_consumer: MakeConsumer,
) -> None:
    relay = await ready(start_relay(RELAY_MAX_MESSAGE_BYTES=str(MAX_BYTES)))
    async with running(make_consumer(count)), walk_from() as walk:
        walk.begin("row refused")
        with psycopg.connect(database_url) as connection:
            connection.execute(WRITE_LARGE, [EVENT_TYPE, MAX_BYTES, EXCHANGE, ROUTING_KEY])
        await walk.sees("1 parked")
        relay.process.stop(signal.SIGTERM)
        await ready(start_relay())
        await walk.follow("See what failed, and retry it")
        await walk.follow("more than max_message_bytes")
        await walk.press("Retry all")

        await applies(table, 1)


async def test_dead_letters_are_sent_back(
    walk_from: WalkFrom, database_url: str, relay: RelayProcess, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 100}, Permanent("no such customer"))
    consumer = make_consumer(handler.handle)
    async with running(consumer):
        await eventually(lambda: not consumer.hindrances(), "the consumer is ready")
        async with walk_from() as walk:
            walk.begin("dead letters")
            write(database_url, 1)
            await walk.sees(f"1 dead letter in {QUEUE}.dead")
            handler.failures.clear()  # a release that knows the customer
            await walk.follow("See why, and retry them")
            await walk.press("Look")
            await walk.follow("no such customer")
            await walk.fill("Why", "1.4 knows the customer")
            await walk.press("Retry all")

            await applies(table, 1)


async def test_held_messages_are_tried_now(
    walk_from: WalkFrom, database_url: str, relay: RelayProcess, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 100}, ConnectionError("the tax office does not answer"))
    async with running(make_consumer(handler.handle, retries=SEVERAL_MINUTES)), walk_from() as walk:
        walk.begin("held messages")
        write(database_url, 1)
        await walk.sees("holds 1 message of 1 key")
        handler.failures.clear()  # it answers again
        await walk.follow("See why, and let it try now")
        await walk.follow("the tax office does not answer")
        await walk.fill("Why", "the tax office is open")
        await walk.press("Try now")

        await applies(table, 1)


async def test_a_dead_consumer_is_started_again(
    walk_from: WalkFrom, database_url: str, relay: RelayProcess, queue: Queue, table: Table, start_worker: StartWorker
) -> None:
    worker = start_worker()

    async def consumes() -> bool:
        return await queue.consumer_count() == 1

    await eventually(consumes, "the consumer is ready")
    async with walk_from() as walk:
        walk.begin("consumer dead")
        worker.stop(signal.SIGKILL)
        write(database_url, 1)
        await walk.sees(f"nothing consumes {QUEUE}")
        await walk.follow("Runbook OutboxConsumerDown")
        await walk.names("python worker.py")
        start_worker()

        await applies(table, 1)


async def test_a_late_consumer_catches_up(
    walk_from: WalkFrom, database_url: str, relay: RelayProcess, table: Table, make_consumer: MakeConsumer
) -> None:
    answers = asyncio.Event()

    @on(EVENT_TYPE, batch=True)
    async def ask_and_count(messages: Sequence[Message], connection: psycopg.AsyncConnection) -> None:
        await answers.wait()
        await count_together(messages, connection)

    consumer = make_consumer(ask_and_count, work=WorkPolicy(batch_size=1000))
    async with running(consumer), walk_from() as walk:
        walk.begin("consumer late")
        write(database_url, MANY)
        await walk.sees(f"messages wait in {QUEUE}")
        await walk.follow("Runbook OutboxConsumerLag")
        await walk.names("python worker.py")
        answers.set()

        await applies(table, MANY)


async def test_a_killed_relay_is_started_again(
    walk_from: WalkFrom,
    database_url: str,
    relay: RelayProcess,
    start_relay: StartRelay,
    table: Table,
    make_consumer: MakeConsumer,
) -> None:
    async with running(make_consumer(count)), walk_from() as walk:
        walk.begin("relay killed")
        relay.process.stop(signal.SIGKILL)
        write(database_url, 1)
        await walk.sees("no relay is alive")
        await walk.names("relay run")
        start_relay()

        await applies(table, 1)


async def test_a_broker_that_blocks_is_given_room(
    walk_from: WalkFrom,
    database_url: str,
    relay: RelayProcess,
    rabbitmq: RabbitServer,
    table: Table,
    make_consumer: MakeConsumer,
) -> None:
    alarm = Alarm(rabbitmq, "memory")
    async with running(make_consumer(count)), walk_from() as walk:
        await alarm.raise_()
        walk.begin("broker blocked")
        write(database_url, 1)
        await walk.sees(alarm.reason)
        await walk.follow("Runbook OutboxRelayDown")
        await walk.follow("a broker that blocks")
        await walk.names("rabbitmqctl set_vm_memory_high_watermark")
        await alarm.clear()

        await applies(table, 1)


async def test_a_broker_that_is_down_is_started(
    walk_from: WalkFrom,
    database_url: str,
    relay: RelayProcess,
    rabbitmq: RabbitServer,
    table: Table,
    make_consumer: MakeConsumer,
) -> None:
    async with running(make_consumer(count)), walk_from() as walk:
        keep_queues(rabbitmq)
        walk.begin("broker down")
        rabbitmq.stop(signal.SIGKILL)
        await walk.sees("broker")
        await walk.follow("Runbook OutboxRelayDown")
        await walk.names("systemctl start rabbitmq-server")
        rabbitmq.launch()
        await asyncio.to_thread(rabbitmq.await_up)
        write(database_url, 1)

        await applies(table, 1)


async def test_a_database_that_is_down_is_started(
    walk_from: WalkFrom, database_url: str, relay: RelayProcess, postgres: PostgresServer, queue: Queue
) -> None:
    async with walk_from() as walk:
        walk.begin("database down")
        postgres.crash()
        await walk.sees("connection")
        await walk.follow("Runbook OutboxDatabaseLost")
        await walk.names("systemctl start postgresql")
        postgres.start()
        write(database_url, 1)

        async def arrives() -> bool:
            return [each.body for each in await queue.ready()] == [b"1"]

        await eventually(arrives, "the message arrives", 120)


@pytest.mark.drills
async def test_a_long_transaction_is_ended(
    walk_from: WalkFrom, relay: RelayProcess, stranger: psycopg.AsyncConnection, database_url: str
) -> None:
    """A session keeps a snapshot; the overview names it, and its runbook the command that ends it."""
    async with walk_from() as walk:
        walk.begin("long transaction")
        await stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await stranger.execute("SELECT count(*) FROM outbox.message")
        await walk.sees(f"session {stranger.info.backend_pid}")
        await walk.follow("Runbook OutboxSession")
        await walk.names("pg_terminate_backend")
        with psycopg.connect(database_url) as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", [stranger.info.backend_pid])
