"""Write events with SQLAlchemy: by a session, by the mapped class, and by an async session."""

import asyncio
import sys

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from relay.outbox import Event, OutboxMessage, add, add_many


def event() -> Event:
    return Event("customer", "17", "InvoiceIssued", {"invoice": 42}, headers={"retries": 1})


async def write(url: str) -> None:
    engine = create_async_engine(url)
    async with AsyncSession(engine) as session, session.begin():
        await add(session, event())
        await add_many(session, [event() for _ in range(100)])
    await engine.dispose()


url = sys.argv[1].replace("postgresql://", "postgresql+psycopg://", 1)
engine = sa.create_engine(url)
with Session(engine) as session, session.begin():
    add(session, event())
    session.add(OutboxMessage(event()))
asyncio.run(write(url))
with Session(engine) as session:
    messages = session.scalars(sa.select(OutboxMessage)).all()
    assert len(messages) == 103
    assert {message.payload for message in messages} == {'{"invoice":42}'}
