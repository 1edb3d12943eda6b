"""Writers that behave badly, and the business tables that they write: invoices, numbered per customer.

A fifth of the transactions roll back. Some stay open for long after their inserts, so that their lower ids become
visible behind higher ones. A customer's row is locked until the end, so a customer's events have one true order.
"""

import asyncio
from dataclasses import dataclass, field
from random import Random
from uuid import UUID

import psycopg

from tests.faults.checker import Written

CUSTOMERS = [f"customer-{number}" for number in range(300)]
WRITERS = 8
ROLLED_BACK, LATE, LARGE = 0.20, 0.05, 0.03  # shares of the transactions

TABLES = """
    CREATE SCHEMA billing;
    CREATE TABLE billing.customer (customer_id text PRIMARY KEY, invoices integer NOT NULL DEFAULT 0);
    CREATE TABLE billing.invoice (
        invoice_id uuid PRIMARY KEY,
        customer_id text NOT NULL,
        number integer NOT NULL,
        amount numeric(12, 2) NOT NULL
    );
    CREATE TABLE billing.invoice_projection (LIKE billing.invoice INCLUDING ALL);
"""

TAKE_NUMBERS = """
    UPDATE billing.customer SET invoices = invoices + %(count)s
    WHERE customer_id = %(customer)s RETURNING invoices
"""

WRITE_INVOICE = "INSERT INTO billing.invoice VALUES (%(id)s, %(customer)s, %(number)s, %(amount)s)"

WRITE_EVENT = """
    INSERT INTO outbox.message (message_id, aggregate_type, aggregate_id, event_type, payload)
    VALUES (%(id)s, 'customer', %(customer)s, 'InvoiceIssued', json_build_object(
        'invoice_id', %(id)s::uuid, 'customer_id', %(customer)s::text, 'number', %(number)s::int,
        'amount', %(amount)s::text))
"""

LINGER = "SELECT pg_sleep(%s)"


@dataclass
class Writers:
    """Several at once, each with its own connection; `history` is what they know of their own work."""

    url: str
    seed: int
    history: list[Written] = field(default_factory=list)
    late: int = 0

    async def prepare(self) -> None:
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            await connection.execute(TABLES)
            async with connection.cursor() as cursor:
                rows = [(customer,) for customer in CUSTOMERS]
                await cursor.executemany("INSERT INTO billing.customer (customer_id) VALUES (%s)", rows)

    async def run(self, stop: asyncio.Event) -> None:
        """Write until told to stop."""
        async with asyncio.TaskGroup() as writers:
            for number in range(WRITERS):
                writers.create_task(self._write(Random(f"{self.seed}/{number}"), stop), name=f"writer-{number}")

    async def _write(self, chance: Random, stop: asyncio.Event) -> None:
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            while not stop.is_set():
                await self._write_transaction(chance, connection)

    async def _write_transaction(self, chance: Random, connection: psycopg.AsyncConnection) -> None:
        is_rolled_back, is_late = chance.random() < ROLLED_BACK, chance.random() < LATE
        count = chance.randrange(50, 150) if chance.random() < LARGE else chance.randrange(1, 4)
        events: list[dict[str, object]] = []
        async with connection.transaction(force_rollback=is_rolled_back), connection.cursor() as cursor:
            # Sorted: writers wait for each other's customers, never in a circle.
            for customer in sorted(chance.sample(CUSTOMERS, chance.randrange(1, 4))):
                await cursor.execute(TAKE_NUMBERS, {"customer": customer, "count": count})
                (last,) = await cursor.fetchone() or (0,)
                for number in range(last - count + 1, last + 1):
                    invoice_id = UUID(int=chance.getrandbits(128), version=4)
                    amount = f"{chance.randrange(1, 100_000) / 100:.2f}"
                    events.append({"id": invoice_id, "customer": customer, "number": number, "amount": amount})
            await cursor.executemany(WRITE_INVOICE, events)
            await cursor.executemany(WRITE_EVENT, events)
            await cursor.execute(LINGER, (chance.uniform(0.1, 0.6) if is_late else chance.uniform(0.001, 0.02),))
        self.late += is_late and not is_rolled_back
        self.history.extend(
            Written(UUID(str(event["id"])), str(event["customer"]), int(str(event["number"])), not is_rolled_back)
            for event in events
        )
