"""The tests of the shop. Only the last one needs a broker."""

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session

from examples.flask_shop.app import NewOrder, Order, OrderPlaced, ProductSeen, make_app, place_order
from relay.consume import Consumer, Inbox, Message, on
from relay.testing import Outbox, Scenario

NOWHERE = "amqp://guest:guest@127.0.0.1:1/"  # where no broker is
CONFIG = Path(__file__).with_name("relay.toml")


def serve(monkeypatch: pytest.MonkeyPatch, database: str, broker: str) -> Iterator[Flask]:
    monkeypatch.setenv("RELAY_DATABASE_URL", database)
    monkeypatch.setenv("RELAY_BROKER_URL", broker)
    app = make_app()
    app.test_cli_runner().invoke(args=["create-tables"])
    yield app
    app.extensions["publisher"].close()
    app.extensions["engine"].dispose()


@pytest.fixture
def client(relay_database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlaskClient]:
    """A client of the shop while the broker is unreachable."""
    for app in serve(monkeypatch, relay_database, NOWHERE):
        yield app.test_client()


@pytest.fixture
def session(client: FlaskClient, relay_database: str) -> Iterator[Session]:
    engine = create_engine(relay_database.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session:
        yield session
    engine.dispose()


def count_orders(session: Session) -> int | None:
    return session.scalar(select(func.count()).select_from(Order))


def test_an_order_is_written_with_its_event(client: FlaskClient, session: Session) -> None:
    order = uuid4()
    answer = client.put(f"/orders/{order}", json={"customer": 17, "amount": "9.90"})

    assert answer.status_code == 201
    assert count_orders(session) == 1
    written = Outbox(session).assert_written("OrderPlaced", key=("customer", 17), count=1)
    assert written == OrderPlaced(order=order, customer=17, amount=Decimal("9.90"))


def test_an_order_that_is_rolled_back_has_no_event(session: Session) -> None:
    place_order(session, uuid4(), NewOrder(customer=17, amount=Decimal(1)))
    session.rollback()

    Outbox(session).assert_nothing_written()


def test_an_order_that_comes_again_has_one_event(client: FlaskClient, session: Session) -> None:
    order = uuid4()
    answers = [client.put(f"/orders/{order}", json={"customer": 17, "amount": "1"}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [201, 409]
    Outbox(session).assert_written("OrderPlaced", count=1)


def test_what_is_seen_waits_in_the_outbox_while_the_broker_is_away(client: FlaskClient, session: Session) -> None:
    client.get("/products/7")

    Outbox(session).assert_written("ProductSeen", key=("product", 7), count=1)


@pytest.mark.asyncio
async def test_events_of_both_kinds_arrive(
    relay_database: str, relay_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[object] = []

    @on(OrderPlaced)
    async def note_order(message: Message[OrderPlaced], _connection: object) -> None:
        arrived.append(message.payload.amount)

    @on(ProductSeen)
    async def note_product(message: Message[ProductSeen], _connection: object) -> None:
        arrived.append(message.payload.product)

    inbox = Inbox(relay_database, "test")
    consumer = Consumer("shop.events", [note_order, note_product], inbox=inbox, broker=relay_broker)
    async with Scenario(relay_database, relay_broker, consumer, config=CONFIG, timeout=30) as scenario:

        def use_the_shop() -> None:
            for app in serve(monkeypatch, relay_database, relay_broker):
                client = app.test_client()
                client.put(f"/orders/{uuid4()}", json={"customer": 17, "amount": "9.90"})
                client.get("/products/7")

        await asyncio.to_thread(use_the_shop)
        await scenario.until(lambda: set(arrived) == {Decimal("9.90"), 7}, "both events arrive")
