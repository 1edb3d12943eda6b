"""The tests of the consumer: events that the kit's relay publishes, and what they have done in the database."""

from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path

import aio_pika
import psycopg
import pytest
import pytest_asyncio
from faststream import TestApp

from examples.faststream_totals.app import make_app
from relay.outbox import Event, add
from relay.testing import Scenario

pytestmark = pytest.mark.asyncio
CONFIG = Path(__file__).with_name("relay.toml")


@pytest_asyncio.fixture
async def scenario(relay_database: str, relay_broker: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scenario]:
    """A relay, and the consumer of the messages that it publishes."""
    monkeypatch.setenv("DATABASE_URL", relay_database)
    monkeypatch.setenv("BROKER_URL", relay_broker)
    async with Scenario(relay_database, relay_broker, config=CONFIG, timeout=15) as scenario, TestApp(make_app()):
        yield scenario


@pytest.fixture
def database(scenario: Scenario, relay_database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(relay_database, autocommit=True) as connection:
        yield connection


def issued(customer: int, amount: str) -> Event:
    return Event("customer", customer, "InvoiceIssued", {"amount": amount})


def write(database: psycopg.Connection, *events: Event) -> None:
    with database.transaction():
        add(database, *events)


def totals(database: psycopg.Connection) -> dict[str, Decimal]:
    return dict(database.execute("SELECT customer, amount FROM total").fetchall())


async def has_dead_letter(broker: str) -> bool:
    async with await aio_pika.connect(broker) as connection, connection.channel() as channel:
        queue = await channel.declare_queue("billing.totals.dead", passive=True)
        return queue.declaration_result.message_count == 1


async def test_invoices_are_added_up(scenario: Scenario, database: psycopg.Connection) -> None:
    write(database, issued(17, "9.90"), issued(18, "1"), issued(17, "0.10"))

    await scenario.until(lambda: totals(database) == {"17": 10, "18": 1})


async def test_a_message_that_comes_twice_counts_once(scenario: Scenario, database: psycopg.Connection) -> None:
    first = issued(17, "1")
    write(database, first, first, issued(17, "100"))

    await scenario.until(lambda: totals(database).get("17", 0) >= 100)
    assert totals(database) == {"17": 101}


async def test_what_the_database_refuses_leaves_nothing_and_is_a_dead_letter(
    scenario: Scenario, database: psycopg.Connection, relay_broker: str
) -> None:
    refused = issued(17, "-5")
    write(database, refused, issued(17, "1"))

    await scenario.until(lambda: totals(database) == {"17": 1})
    await scenario.until(lambda: has_dead_letter(relay_broker), "the other one is a dead letter")
    assert database.execute("SELECT FROM seen WHERE message_id = %s", [refused.message_id]).rowcount == 0


async def test_a_payload_that_is_not_valid_is_a_dead_letter(
    scenario: Scenario, database: psycopg.Connection, relay_broker: str
) -> None:
    write(database, issued(17, "ten"), issued(17, "1"))

    await scenario.until(lambda: totals(database) == {"17": 1})
    await scenario.until(lambda: has_dead_letter(relay_broker), "the other one is a dead letter")


async def test_a_message_whose_database_goes_away_is_applied_when_it_is_back(
    scenario: Scenario, database: psycopg.Connection, relay_database: str
) -> None:
    with psycopg.connect(relay_database) as other:
        other.execute("LOCK TABLE total")
        write(database, issued(17, "1"), issued(17, "2"))
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INTO total%'"
        await scenario.until(lambda: database.execute(waiting).rowcount == 1, "the message waits for the lock")
        database.execute(f"SELECT pg_terminate_backend(pid) FROM ({waiting})")

    await scenario.until(lambda: totals(database) == {"17": 3})
