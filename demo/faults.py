"""What an operator finds in `make console`: rows that SQL writes, and what relay and consumer make of them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psycopg

from demo import queue
from demo.shop import QUEUE, TAXED, UNKNOWN
from demo.stages import run_command
from relay.config.settings import BrokerSettings
from relay.servers.rabbitmq.connection import connect

EXCHANGE, BROKEN = "shop", "refund.*"
TRADE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', 'customer-' || number, 'OrderPlaced', json_build_object('number', number)
    FROM generate_series(1, 1 + (random() * 9)::integer) AS number
"""
SCANS = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', 'customer-' || 100 + number, 'OrderScanned', json_build_object('scan', repeat('x', 5000))
    FROM generate_series(1, 12) AS number
"""
WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', %s, %s, json_build_object('number', number) FROM generate_series(1, 3) AS number
"""
RETRY = ["parked", "retry", "--event-type", "OrderScanned", "--stages", "1,all", "--stop-when-failing", "5%"]
COUNT_APPLIED = "SELECT count(*) FROM outbox.processed_message WHERE consumer_name = 'shop'"
COUNT_PARKED = "SELECT count(*) FROM outbox.message_state WHERE state = 'parked' AND event_type = 'OrderScanned'"
COUNT_PAUSED = "SELECT count(*) FROM outbox.job WHERE state = 'paused'"
COUNT_QUARANTINED = (
    "SELECT count(*) FROM outbox.message_state WHERE state = 'quarantined' AND event_type = 'RefundPaid'"
)
# A message behind a dead letter is held for a moment, too.
COUNT_HELD = f"SELECT count(*) FROM outbox.held_message WHERE consumer_name = 'shop' AND key = 'customer/{TAXED}'"


class Shop:
    """The shop's outbox and queue, into which faults come."""

    def __init__(self, connection: psycopg.Connection, broker: BrokerSettings, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._broker = broker
        self._environment = environment

    def trade(self) -> None:
        """Write the orders of a second."""
        self._connection.execute(TRADE)

    def write_scans(self) -> None:
        """Write payloads that are too large."""
        self._connection.execute(SCANS)

    def write(self, event: str, customer: str) -> None:
        """Write three events of a customer."""
        self._connection.execute(WRITE, [customer, event])

    def retry_in_stages(self) -> None:
        """Retry what fails again, so that the job pauses."""
        run_command("retry", [*RETRY, "--why", "the limit is raised", "--by", "demo"], self._environment)

    def count(self, statement: str) -> int:
        found = self._connection.execute(statement).fetchone()
        assert found is not None, "an aggregate gives one row"
        return int(found[0])

    def letters(self) -> int:
        """Return how many dead letters there are."""
        return queue.depth(self._broker, f"{QUEUE}.dead")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to see in the console: what brings it about, and how many there are of it."""

    name: str
    bring: Callable[[Shop], None]
    count: Callable[[Shop], int]


FAULTS: Sequence[Fault] = (
    Fault("Applied messages", Shop.trade, lambda shop: shop.count(COUNT_APPLIED)),
    Fault("A failing group", Shop.write_scans, lambda shop: shop.count(COUNT_PARKED)),
    Fault("A paused job", Shop.retry_in_stages, lambda shop: shop.count(COUNT_PAUSED)),
    Fault(
        "A broken route",
        lambda shop: shop.write("RefundPaid", "customer-refunds"),
        lambda shop: shop.count(COUNT_QUARANTINED),
    ),
    Fault("Dead letters", lambda shop: shop.write("OrderPlaced", UNKNOWN), Shop.letters),
    Fault("Held messages", lambda shop: shop.write("OrderPlaced", TAXED), lambda shop: shop.count(COUNT_HELD)),
)


def break_route(broker: BrokerSettings) -> None:
    """Take away a binding that demo/shop.toml lists."""
    asyncio.run(_break_route(broker))


async def _break_route(broker: BrokerSettings) -> None:
    connection = await connect(broker, "outbox-demo")
    async with connection:
        channel = await connection.channel()
        bound = await channel.get_queue(QUEUE)
        await bound.unbind(EXCHANGE, BROKEN)
