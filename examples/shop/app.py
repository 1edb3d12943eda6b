"""A shop in FastAPI with SQLAlchemy: orders with their events, and a consumer that adds them up, in one process.

uvicorn --factory examples.shop.app:make_app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from uuid import UUID, uuid4

from fastapi import FastAPI
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from relay.consume import Consumer, Inbox, Message, Permanent, on
from relay.outbox import add, event, upcast

QUEUE = "shop.totals"
BLOCKED = 13  # the number of a customer to whom nothing is sold


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "order"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[int]
    amount: Mapped[Decimal]


class Total(Base):
    __tablename__ = "total"
    customer: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[Decimal]


class NewOrder(BaseModel):
    customer: int
    amount: Decimal = Field(gt=0)


@event("OrderPlaced", version=1, key=("customer", "customer"))
class OrderPlacedInCents(BaseModel):
    order: UUID
    customer: int
    cents: int


@event("OrderPlaced", version=2, key=("customer", "customer"))
class OrderPlaced(BaseModel):
    order: UUID
    customer: int
    amount: Decimal


@upcast
def with_amount(old: OrderPlacedInCents) -> OrderPlaced:
    return OrderPlaced(order=old.order, customer=old.customer, amount=Decimal(old.cents) / 100)


async def place_order(session: AsyncSession, new: NewOrder) -> UUID:
    """Write an order and its event; both are there when the caller commits, or neither is."""
    order = Order(id=uuid4(), customer=new.customer, amount=new.amount)
    session.add(order)
    await add(session, OrderPlaced(order=order.id, customer=new.customer, amount=new.amount))
    return order.id


@on(OrderPlaced)
async def add_up(message: Message[OrderPlaced], session: AsyncSession) -> None:
    placed = message.payload
    total = insert(Total).values(customer=placed.customer, amount=placed.amount)
    total = total.on_conflict_do_update(index_elements=["customer"], set_={"amount": Total.amount + placed.amount})
    await session.execute(total)
    if placed.customer == BLOCKED:
        raise Permanent("the customer is blocked")


async def total_of(session: AsyncSession, customer: int) -> Decimal:
    return await session.scalar(select(Total.amount).where(Total.customer == customer)) or Decimal(0)


def make_app() -> FastAPI:
    """Return the application; the consumer runs while it does, and is drained when the server stops."""
    database = os.environ["RELAY_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")
    engine = create_async_engine(database)
    sessions = async_sessionmaker(engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        inbox = Inbox(sessions, "totals")
        async with Consumer(QUEUE, [add_up], inbox=inbox, broker=os.environ["RELAY_BROKER_URL"], start_timeout=60):
            yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders")
    async def order(new: NewOrder) -> UUID:
        async with sessions.begin() as session:
            return await place_order(session, new)

    @app.get("/customers/{customer}/total")
    async def total(customer: int) -> Decimal:
        async with sessions() as session:
            return await total_of(session, customer)

    return app
