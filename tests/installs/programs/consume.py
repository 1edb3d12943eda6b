"""Apply the message in the queue once, with psycopg."""

import asyncio
import sys

import psycopg

from relay.consume import Consumer, Inbox, Message, on
from relay.probes.consumer import answering_for


@on("Counted")
async def apply(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute("SELECT %s::int", [message.json()])
    consumer.stop()


async def consume() -> None:
    async with answering_for(consumer, "127.0.0.1:0"):
        await consumer.run()


database, broker = sys.argv[1:]
consumer = Consumer("billing", [apply], inbox=Inbox(database, "projection"), broker=broker)
asyncio.run(consume())
assert consumer.counters.applied == 1, consumer.counters
