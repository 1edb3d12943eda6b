"""Totals in FastStream, without `relay.consume`: each message has its effect once, in order per key.

faststream run --factory examples.faststream_totals.app:make_app
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal

import psycopg
from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel

RETRY_AFTER = 1.0  # seconds
TABLES = """
    CREATE TABLE IF NOT EXISTS seen (message_id uuid PRIMARY KEY);
    CREATE TABLE IF NOT EXISTS total (customer text PRIMARY KEY, amount numeric NOT NULL CHECK (amount >= 0));
"""
NOTE = "INSERT INTO seen (message_id) VALUES (%s) ON CONFLICT DO NOTHING"
ADD = """
    INSERT INTO total (customer, amount) VALUES (%s, %s)
    ON CONFLICT (customer) DO UPDATE SET amount = total.amount + EXCLUDED.amount
"""


class InvoiceIssued(BaseModel):
    amount: Decimal


async def apply(connection: psycopg.AsyncConnection, message: RabbitMessage, issued: InvoiceIssued) -> None:
    """Write the message's id and its effect; both are there when the caller commits, or neither is."""
    is_new = (await connection.execute(NOTE, [message.raw_message.message_id])).rowcount == 1
    if is_new:
        await connection.execute(ADD, [message.headers["x-aggregate-id"], issued.amount])


def make_app() -> FastStream:
    pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False, check=AsyncConnectionPool.check_connection)
    broker = RabbitBroker(os.environ["BROKER_URL"], graceful_timeout=10)
    # What raises an error becomes a dead letter: a payload that is not valid, and any other type of event.
    totals = broker.subscriber(
        RabbitQueue("billing.totals", declare=False),
        channel=Channel(prefetch_count=1),
        ack_policy=AckPolicy.REJECT_ON_ERROR,
    )

    @totals(filter=lambda message: message.raw_message.type == "InvoiceIssued")
    async def add_up(issued: InvoiceIssued, message: RabbitMessage) -> None:
        while True:
            try:
                async with pool.connection() as connection:  # a transaction, which is committed at the end
                    return await apply(connection, message, issued)
            except (psycopg.DataError, psycopg.IntegrityError):
                raise  # by this message
            except psycopg.Error:
                await asyncio.sleep(RETRY_AFTER)  # meanwhile the later messages of the key wait in the queue

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with pool:
            async with pool.connection() as connection:
                await connection.execute(TABLES)
            yield

    return FastStream(broker, lifespan=lifespan)
