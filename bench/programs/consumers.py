"""The programs that bench.consume measures: `python -m bench.programs.consumers KIND`, with URLs in the environment.

Each takes what is in the queue until it is told to stop. For each message it writes the inbox row and one business row
in one transaction, and acknowledges it.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from uuid import UUID

import aio_pika
import psycopg
import uvloop
from aio_pika.abc import AbstractIncomingMessage
from pydantic import SecretStr

from bench.frame.queue import QUEUE
from relay.config.settings import BrokerSettings, DatabaseSettings, LogSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.observe.log import set_up

DATABASE_URL, BROKER_URL = "CONSUMER_DATABASE_URL", "CONSUMER_BROKER_URL"
CONSUMER = "bench"
CONCURRENCY = 4
BATCH = 50

REMEMBER = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day, business_key)
    VALUES (%s, %s, (%s AT TIME ZONE 'UTC')::date, %s)
    ON CONFLICT DO NOTHING
"""
PROJECT = "INSERT INTO projection (message_id, customer, bytes) VALUES (%s, %s, %s)"


class ConsumerKind(StrEnum):
    """What takes the messages."""

    BARE = "bare loop"  # aio-pika and psycopg, as one writes it without a library
    SINGLE = "one a transaction"
    BATCHED = "batches"
    PIPELINED = "batches, pipeline"
    LISTS = "batches, list handler"


@on("InvoiceIssued")
async def project(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute(PROJECT, (message.message_id, message.aggregate_id, len(message.body)))


@on("InvoiceIssued", batch=True)
async def project_all(messages: Sequence[Message], connection: psycopg.AsyncConnection) -> None:
    rows = [(message.message_id, message.aggregate_id, len(message.body)) for message in messages]
    async with connection.cursor() as cursor:
        await cursor.executemany(PROJECT, rows)


async def run(kind: ConsumerKind) -> None:
    """Consume until SIGTERM."""
    if kind is ConsumerKind.BARE:
        await _run_bare()
        return
    set_up(LogSettings())  # as programs do
    inbox = Inbox(DatabaseSettings(url=SecretStr(os.environ[DATABASE_URL])), CONSUMER)
    consumer = Consumer(
        QUEUE,
        [project_all if kind is ConsumerKind.LISTS else project],
        inbox=inbox,
        broker=BrokerSettings(url=SecretStr(os.environ[BROKER_URL])),
        work=WorkPolicy(
            concurrency=CONCURRENCY,
            batch_size=1 if kind is ConsumerKind.SINGLE else BATCH,
            pipeline=kind is ConsumerKind.PIPELINED,
        ),
    )
    await consumer.run()


async def _run_bare() -> None:
    """Let workers with a connection each take what is delivered next; nobody looks after the order of a key."""
    delivered: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()

    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(os.environ[DATABASE_URL], autocommit=True) as connection:
            while True:
                message = await delivered.get()
                message_id, customer = UUID(message.message_id or ""), str(message.headers["x-aggregate-id"])
                async with connection.transaction():
                    row = (CONSUMER, message_id, message.timestamp, customer)
                    remembered = await connection.execute(REMEMBER, row)
                    if remembered.rowcount:
                        await connection.execute(PROJECT, (message_id, customer, len(message.body)))
                await message.ack()

    async with await aio_pika.connect(os.environ[BROKER_URL]) as connection, asyncio.TaskGroup() as workers:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=CONCURRENCY)
        for _ in range(CONCURRENCY):
            workers.create_task(work())
        await (await channel.get_queue(QUEUE)).consume(delivered.put)


if __name__ == "__main__":
    uvloop.run(run(ConsumerKind(sys.argv[1])))
