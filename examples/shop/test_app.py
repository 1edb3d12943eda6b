"""The tests of the shop, without a broker: `pytest examples/shop`."""

from collections.abc import AsyncIterator
from decimal import Decimal
from uuid import uuid4

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from examples.shop.app import BLOCKED, Base, NewOrder, OrderPlaced, OrderPlacedInCents, add_up, place_order, total_of
from relay.consume import Inbox
from relay.testing import AsyncOutbox, Harness

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def engine(relay_database: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(relay_database.replace("postgresql://", "postgresql+psycopg://"))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield engine
    await engine.dispose()


@pytest_asyncio.fixture
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session:
        yield session


@pytest.fixture
def harness(engine: AsyncEngine) -> Harness:
    return Harness([add_up], inbox=Inbox(async_sessionmaker(engine), "totals"))


async def test_an_order_is_written_with_its_event(session: AsyncSession) -> None:
    order = await place_order(session, NewOrder(customer=17, amount=Decimal("9.90")))

    outbox = AsyncOutbox(session)
    written = await outbox.assert_written("OrderPlaced", key=("customer", 17), payload={"amount": "9.90"}, count=1)
    assert written == OrderPlaced(order=order, customer=17, amount=Decimal("9.90"))


async def test_an_order_that_is_rolled_back_has_no_event(session: AsyncSession) -> None:
    await place_order(session, NewOrder(customer=17, amount=Decimal(1)))
    await session.rollback()

    await AsyncOutbox(session).assert_nothing_written()


async def test_orders_are_added_up(session: AsyncSession, harness: Harness) -> None:
    for amount in (1, 2):
        await place_order(session, NewOrder(customer=17, amount=Decimal(amount)))
    await session.commit()

    delivered = await harness.drain(AsyncOutbox(session))

    delivered.raise_first()
    assert await total_of(session, 17) == 3


async def test_an_order_counts_once_also_when_it_comes_again(session: AsyncSession, harness: Harness) -> None:
    placed = OrderPlaced(order=uuid4(), customer=17, amount=Decimal(5))

    delivered = await harness.crash_before_ack(placed)

    delivered.raise_first()
    assert delivered.duplicates == 1
    assert await total_of(session, 17) == 5


async def test_a_handler_that_fails_leaves_nothing(session: AsyncSession, harness: Harness) -> None:
    await harness.deliver(OrderPlaced(order=uuid4(), customer=BLOCKED, amount=Decimal(5)))

    assert [dead.error for dead in harness.dead] == ["relay.consume.classify.Permanent: the customer is blocked"]
    assert await total_of(session, BLOCKED) == 0


async def test_orders_of_the_first_version_are_added_up_too(session: AsyncSession, harness: Harness) -> None:
    delivered = await harness.deliver(OrderPlacedInCents(order=uuid4(), customer=17, cents=250))

    delivered.raise_first()
    assert await total_of(session, 17) == Decimal("2.5")
