"""The tests of the tasks. Only the last one needs a broker."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest
from celery.contrib.testing.worker import start_worker
from sqlalchemy import event, func, select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from examples.celery_shop.tasks import Order, OrderPlaced, app, connect, make_tables, new_engine, place_order, sessions
from relay.consume import Consumer, Inbox, Message, on
from relay.testing import Outbox, Scenario

CONFIG = Path(__file__).with_name("relay.toml")


@pytest.fixture
def session(relay_database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session next to those of the tasks, which are as in a process of a worker's pool."""
    monkeypatch.setenv("RELAY_DATABASE_URL", relay_database)
    make_tables()
    connect()
    engine = new_engine()
    with Session(engine) as session:
        yield session
    engine.dispose()
    sessions.kw["bind"].dispose()


def count_orders(session: Session) -> int | None:
    return session.scalar(select(func.count()).select_from(Order))


def test_an_order_is_written_with_its_event(session: Session) -> None:
    order = uuid4()
    place_order(str(order), 17, "9.90")

    assert count_orders(session) == 1
    written = Outbox(session).assert_written("OrderPlaced", key=("customer", 17), count=1)
    assert written == OrderPlaced(order=order, customer=17, amount=Decimal("9.90"))


def test_a_task_that_runs_twice_writes_one_event(session: Session) -> None:
    order = str(uuid4())
    for _ in range(2):
        place_order(order, 17, "9.90")

    assert count_orders(session) == 1
    Outbox(session).assert_written("OrderPlaced", count=1)


def test_an_order_that_the_database_refuses_has_no_event(session: Session) -> None:
    with pytest.raises(IntegrityError):
        place_order(str(uuid4()), 17, "0")

    Outbox(session).assert_nothing_written()


def test_a_task_that_loses_its_database_is_tried_again_and_writes_one_event(session: Session) -> None:
    lost = iter([True, False])

    def lose(*_: object) -> None:
        if next(lost):
            raise OperationalError("COMMIT", {}, Exception("the connection is lost"))

    event.listen(sessions.kw["bind"], "commit", lose)
    place_order.apply([str(uuid4()), 17, "9.90"]).get()

    assert count_orders(session) == 1
    Outbox(session).assert_written("OrderPlaced", count=1)


@pytest.mark.asyncio
@pytest.mark.usefixtures("session")
async def test_the_event_of_a_task_arrives(relay_database: str, relay_broker: str) -> None:
    arrived: list[Decimal] = []

    @on(OrderPlaced)
    async def note(message: Message[OrderPlaced], _connection: object) -> None:
        arrived.append(message.payload.amount)

    app.conf.update(broker_url=relay_broker, broker_heartbeat=1)  # the worker of a test ends at its next heartbeat
    consumer = Consumer("shop.orders", [note], inbox=Inbox(relay_database, "test"), broker=relay_broker)
    async with Scenario(relay_database, relay_broker, consumer, config=CONFIG, timeout=30) as scenario:
        with start_worker(app, pool="solo", perform_ping_check=False):
            place_order.delay(str(uuid4()), 17, "9.90")
            await scenario.until(lambda: arrived == [Decimal("9.90")], "the event arrives")
