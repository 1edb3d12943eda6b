"""The tests of the programs in Node, by the kit: what they have written, and what the relay's messages have done."""

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import aio_pika
import psycopg
import pytest
import pytest_asyncio

from relay.outbox import Event, add
from relay.testing import Outbox, Scenario

HERE = Path(__file__).parent


@pytest.fixture
def database(relay_database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(relay_database, autocommit=True) as connection:
        yield connection


def write_orders(database: str, *orders: dict[str, object]) -> subprocess.CompletedProcess[str]:
    lines = "".join(f"{json.dumps(order)}\n" for order in orders)
    environment = {**os.environ, "DATABASE_URL": database}
    return subprocess.run(
        ["node", "writer.mjs"], cwd=HERE, env=environment, input=lines, text=True, capture_output=True, check=False
    )


def test_an_order_is_written_with_its_event(database: psycopg.Connection, relay_database: str) -> None:
    order = {"order": str(uuid4()), "customer": 17, "amount": "9.90"}
    done = write_orders(relay_database, order)

    assert done.returncode == 0, done.stderr
    assert database.execute('SELECT id::text, customer, amount::text FROM "order"').fetchall() == [(*order.values(),)]
    Outbox(database).assert_written("OrderPlaced", key=("customer", 17), payload=order, count=1)


def test_an_order_that_comes_again_has_one_event(database: psycopg.Connection, relay_database: str) -> None:
    order = {"order": str(uuid4()), "customer": 17, "amount": "9.90"}
    write_orders(relay_database, order, order)

    Outbox(database).assert_written("OrderPlaced", count=1)


def test_an_order_that_the_database_refuses_has_no_event(database: psycopg.Connection, relay_database: str) -> None:
    done = write_orders(relay_database, {"order": str(uuid4()), "customer": 17, "amount": "0"})

    assert "order_amount_check" in done.stderr
    Outbox(database).assert_nothing_written()


@pytest_asyncio.fixture
async def scenario(relay_database: str, relay_broker: str) -> AsyncIterator[Scenario]:
    async with Scenario(relay_database, relay_broker, config=HERE / "relay.toml", timeout=15) as scenario:
        yield scenario


@pytest.fixture
def consumer(scenario: Scenario, relay_database: str, relay_broker: str) -> Iterator[None]:
    """The consumer of what the relay of the scenario publishes."""
    environment = {**os.environ, "DATABASE_URL": relay_database, "BROKER_URL": relay_broker}
    consumer = subprocess.Popen(["node", "consumer.mjs"], cwd=HERE, env=environment)
    yield
    consumer.terminate()
    consumer.wait()


def issued(customer: int, amount: str) -> Event:
    return Event("customer", customer, "InvoiceIssued", {"amount": amount})


def issue(database: psycopg.Connection, *events: Event) -> None:
    with database.transaction():
        add(database, *events)


def totals(database: psycopg.Connection) -> dict[str, Decimal]:
    has_table = database.execute("SELECT FROM pg_tables WHERE tablename = 'total'").rowcount
    return dict(database.execute("SELECT customer, amount FROM total").fetchall()) if has_table else {}


async def has_dead_letter(broker: str) -> bool:
    async with await aio_pika.connect(broker) as connection, connection.channel() as channel:
        queue = await channel.declare_queue("billing.totals.dead", passive=True)
        return queue.declaration_result.message_count == 1


@pytest.mark.asyncio
@pytest.mark.usefixtures("consumer")
async def test_invoices_are_added_up(scenario: Scenario, database: psycopg.Connection) -> None:
    issue(database, issued(17, "9.90"), issued(18, "1"), issued(17, "0.10"))

    await scenario.until(lambda: totals(database) == {"17": 10, "18": 1})


@pytest.mark.asyncio
@pytest.mark.usefixtures("consumer")
async def test_a_message_that_comes_twice_counts_once(scenario: Scenario, database: psycopg.Connection) -> None:
    first = issued(17, "1")
    issue(database, first, first, issued(17, "100"))

    await scenario.until(lambda: totals(database).get("17", 0) >= 100)
    assert totals(database) == {"17": 101}


@pytest.mark.asyncio
@pytest.mark.usefixtures("consumer")
async def test_what_the_database_refuses_leaves_nothing_and_is_a_dead_letter(
    scenario: Scenario, database: psycopg.Connection, relay_broker: str
) -> None:
    refused = issued(17, "-5")
    issue(database, refused, issued(17, "1"))

    await scenario.until(lambda: totals(database) == {"17": 1})
    await scenario.until(lambda: has_dead_letter(relay_broker), "the other one is a dead letter")
    assert database.execute("SELECT FROM seen WHERE message_id = %s", [refused.message_id]).rowcount == 0


@pytest.mark.asyncio
@pytest.mark.usefixtures("consumer")
async def test_a_message_whose_database_goes_away_is_applied_when_it_is_back(
    scenario: Scenario, database: psycopg.Connection, relay_database: str
) -> None:
    issue(database, issued(17, "1"))
    await scenario.until(lambda: totals(database) == {"17": 1})
    with psycopg.connect(relay_database) as other:
        other.execute("LOCK TABLE total")
        issue(database, issued(17, "2"), issued(17, "3"))
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INTO total%'"
        await scenario.until(lambda: database.execute(waiting).rowcount == 1, "the message waits for the lock")
        database.execute(f"SELECT pg_terminate_backend(pid) FROM ({waiting})")

    await scenario.until(lambda: totals(database) == {"17": 6})
