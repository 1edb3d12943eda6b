"""Handlers of each of the four kinds of SQLAlchemy, and the table that they write."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from relay.consume import Message, on


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effect"

    position: Mapped[int] = mapped_column(sa.Identity(always=True), primary_key=True)
    message_id: Mapped[Any] = mapped_column(sa.Uuid)
    key: Mapped[str | None]
    number: Mapped[int]


def effect(message: Message) -> dict[str, Any]:
    return {"message_id": message.message_id, "key": message.aggregate_id, "number": message.json()}


@on("Counted")
def by_connection(message: Message, connection: sa.Connection) -> None:
    connection.execute(sa.insert(Effect).values(effect(message)))


@on("Counted")
def by_session(message: Message, session: Session) -> None:
    session.add(Effect(**effect(message)))


@on("Counted")
async def by_async_connection(message: Message, connection: AsyncConnection) -> None:
    await connection.execute(sa.insert(Effect).values(effect(message)))


@on("Counted")
async def by_async_session(message: Message, session: AsyncSession) -> None:
    session.add(Effect(**effect(message)))


HANDLERS: dict[str, Any] = {
    "connection": by_connection,
    "session": by_session,
    "async connection": by_async_connection,
    "async session": by_async_session,
}
KINDS = list(HANDLERS)


def engine_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://", 1) + "?application_name=outbox-consumer"
