"""The whole line, from Spark to the consumer, in a database that has no schema `outbox` at all."""

import asyncio
import json
import signal
from contextlib import ExitStack
from pathlib import Path

import aio_pika
import psycopg
import pytest
from pyspark.sql import SparkSession

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, on
from relay.outbox import Event, add
from relay.testing.servers.process import Process
from tests.cli.command import RELAY, Command, Result
from tests.consume.effects import running
from tests.spark.frames import invoices, one, save
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

QUEUE = "billing"


@on("InvoiceIssued")
async def project(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute("INSERT INTO projection (body) VALUES (%s)", [message.body.decode()])


@pytest.mark.jobs
@pytest.mark.timeout(300)
async def test_every_part_finds_the_tables_in_a_schema_of_another_name(
    spark: SparkSession,
    options: dict[str, str],
    connection: psycopg.Connection,
    database: DatabaseSettings,
    broker: BrokerSettings,
    tmp_path: Path,
) -> None:
    relay = Command(
        tmp_path,
        RELAY_DATABASE_URL=database.url.get_secret_value(),
        RELAY_DATABASE_SCHEMA="events",
        RELAY_BROKER_URL=broker.url.get_secret_value(),
        RELAY_MAX_ATTEMPTS="1",
        RELAY_MAX_MESSAGE_BYTES="4096",
    )

    async def told(*arguments: str) -> Result:
        return await asyncio.to_thread(relay.process, *arguments)

    connection.execute("DROP SCHEMA outbox CASCADE; CREATE TABLE projection (body json)")
    async with await aio_pika.connect(broker.url.get_secret_value()) as connected:
        await declare_bound(await connected.channel(), QUEUE)
    migrated = await told("migrate")
    save(invoices(spark), options, outboxSchema="events")
    with psycopg.connect(options["url"]) as writer:
        add(writer, Event("customer", "lost", "InvoiceIssued", {"x": "x" * 5000}), schema="events")
    inbox = Inbox(database.model_copy(update={"schema_name": "events"}), "projection")
    consumer = Consumer(QUEUE, [project], inbox=inbox, broker=broker)
    node = Process([RELAY, "run"], log=tmp_path / "relay.log", environment=relay.environment({}))
    with ExitStack() as started:
        started.callback(node.stop, signal.SIGKILL)
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 100, "every event of Spark is applied", 60)
            await eventually(lambda: one(connection, "SELECT count(*) FROM events.message_parked") == 1, "it is parked")
            healthy = await told("healthcheck")
            status = await told("status", "--output", "json")
            discarded = await told("parked", "discard", "--all", "--yes", "--why", "a trial")
            replayed = await told("replay", "--aggregate-id", "C1")
            await eventually(lambda: consumer.counters.duplicates == 15, "what is replayed is recognised", 60)
        node.stop(signal.SIGTERM)

    assert [each.code for each in (migrated, healthy, status, discarded, replayed)] == [0] * 5
    assert node.returncode == 0
    assert (json.loads(status.out)["pending"], json.loads(status.out)["parked"]) == (0, 1)
    assert one(connection, "SELECT count(*) FROM projection") == 100
    assert one(connection, "SELECT count(*) FROM events.processed_message") == 100
    assert one(connection, "SELECT to_regnamespace('outbox')") is None
