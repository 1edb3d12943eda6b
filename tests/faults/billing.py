"""Writers that behave badly, and the business tables that they write: invoices, numbered per customer.

A fifth of the transactions roll back. Some stay open for long after their inserts, so that their lower ids become
visible behind higher ones. A customer's row is locked until the end, so a customer's events have one true order.
A writer that loses its connection comes back; when that was under the COMMIT, it does not know how it ended.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

import orjson
import psycopg
from psycopg.errors import Diagnostic

from tests.faults.history import Ending, History, Written, digest

CUSTOMERS = [f"customer-{number}" for number in range(300)]
WRITERS = 8
ROLLED_BACK, LATE, LARGE = 0.20, 0.05, 0.03  # shares of the transactions
RECONNECT_AFTER = 0.05  # seconds
NOT_REPLICATED = "01000"  # the notice that says: committed here, but perhaps not on the standby

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
    VALUES (%(id)s, 'customer', %(customer)s, 'InvoiceIssued', %(payload)s)
"""

WRITTEN = "SELECT invoice_id FROM billing.invoice"  # the business rows that are there

LINGER = "SELECT pg_sleep(%s)"


@dataclass
class Writers:
    """Several writers, each with its own connection. They write into `history` what they know of their work.

    Attributes:
        pause: seconds between two transactions of a writer, on average; flat out without it.
        large: the share of transactions with some hundred messages of a few keys.
        written: messages of transactions that have ended, in any way.
        late: transactions that committed long after their inserts.
    """

    url: str
    seed: int
    history: History = field(default_factory=list)
    pause: float = 0.0
    large: float = LARGE
    written: int = 0
    late: int = 0

    async def prepare(self) -> None:
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            await connection.execute(TABLES)
            async with connection.cursor() as cursor:
                rows = [(customer,) for customer in CUSTOMERS]
                await cursor.executemany("INSERT INTO billing.customer (customer_id) VALUES (%s)", rows)

    async def run(self, stop: asyncio.Event) -> None:
        """Write until `stop` is set."""
        async with asyncio.TaskGroup() as writers:
            for number in range(WRITERS):
                writers.create_task(self._write(Random(f"{self.seed}/{number}"), stop), name=f"writer-{number}")

    async def _write(self, chance: Random, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
                    while not stop.is_set():
                        await self._write_transaction(chance, connection)
                        await asyncio.sleep(chance.uniform(0, 2 * self.pause))
            except (psycopg.OperationalError, psycopg.InterfaceError):  # what was lost with it is in the history
                await asyncio.sleep(RECONNECT_AFTER)

    async def _write_transaction(self, chance: Random, connection: psycopg.AsyncConnection) -> None:
        is_rolled_back, is_late = chance.random() < ROLLED_BACK, chance.random() < LATE
        linger = chance.uniform(0.1, 0.6) if is_late else chance.uniform(0.001, 0.02)
        count = chance.randrange(50, 150) if chance.random() < self.large else chance.randrange(1, 4)
        customers = sorted(chance.sample(CUSTOMERS, chance.randrange(1, 4)))
        invoices: list[dict[str, Any]] = []
        ending = Ending.ROLLED_BACK  # until the COMMIT is on its way
        doubts: list[Diagnostic] = []
        connection.add_notice_handler(doubts.append)
        try:
            async with connection.transaction(force_rollback=is_rolled_back):
                # Sorted: writers wait for each other's customers, never in a circle.
                for customer in customers:
                    invoices += await _take_numbers(chance, connection, customer, count)
                await insert(connection, invoices)
                await connection.execute(LINGER, (linger,))
                ending = Ending.ROLLED_BACK if is_rolled_back else Ending.UNKNOWN
            if not is_rolled_back and not any(notice.sqlstate == NOT_REPLICATED for notice in doubts):
                ending = Ending.COMMITTED
                self.late += is_late
        finally:
            connection.remove_notice_handler(doubts.append)
            self.written += len(invoices)
            self.history.extend(written(one, ending) for one in invoices)


def invoice(chance: Random, customer: str, number: int) -> dict[str, Any]:
    """Return a random invoice, with its event."""
    invoice_id = UUID(int=chance.getrandbits(128), version=4)
    amount = f"{chance.randrange(1, 100_000) / 100:.2f}"
    event = {"invoice_id": invoice_id, "customer_id": customer, "number": number, "amount": amount}
    payload = orjson.dumps(event).decode()
    return {"id": invoice_id, "customer": customer, "number": number, "amount": amount, "payload": payload}


async def insert(connection: psycopg.AsyncConnection, invoices: Sequence[Mapping[str, Any]]) -> None:
    """Insert invoices and their events."""
    async with connection.cursor() as cursor:
        await cursor.executemany(WRITE_INVOICE, invoices)
        await cursor.executemany(WRITE_EVENT, invoices)


def written(one: Mapping[str, Any], ending: Ending) -> Written:
    """Return the record of an invoice's event, for `history` after its transaction has ended."""
    return Written(one["id"], f"customer/{one['customer']}", one["number"], ending, digest(one["payload"].encode()))


async def _take_numbers(
    chance: Random, connection: psycopg.AsyncConnection, customer: str, count: int
) -> list[dict[str, Any]]:
    cursor = await connection.execute(TAKE_NUMBERS, {"customer": customer, "count": count})
    (last,) = await cursor.fetchone() or (0,)
    return [invoice(chance, customer, number) for number in range(last - count + 1, last + 1)]
