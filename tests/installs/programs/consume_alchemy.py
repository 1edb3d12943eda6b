"""Apply the message in the queue once, with a session of SQLAlchemy."""

import asyncio
import sys

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from relay.consume import Consumer, Inbox, Message, on


@on("Counted")
async def apply(message: Message, session: AsyncSession) -> None:
    await session.execute(sa.text("SELECT CAST(:number AS int)"), {"number": message.json()})
    consumer.stop()


database, broker = sys.argv[1:]
engine = create_async_engine(database.replace("postgresql://", "postgresql+psycopg://", 1), pool_size=7)
inbox = Inbox(async_sessionmaker(engine), "projection")
consumer = Consumer("billing", [apply], inbox=inbox, broker=broker)
asyncio.run(consumer.run())
assert consumer.counters.applied == 1, consumer.counters
