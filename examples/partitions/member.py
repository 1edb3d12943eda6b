"""Keep a running total of each customer, in memory and in a table: python -m examples.partitions.member.

Start as many as you like: they share the 16 partitions, and each customer's invoices go to one of them, in order. So a
member may keep what it knows of its customers in memory. It loads that when it gets a partition, and forgets it when
the partition goes. The table is written in the transaction of the message, and is what counts.

Servers are found as those of `relay run` (RELAY_DATABASE_URL, RELAY_BROKER_URL, RELAY_CONFIG); probes and metrics are
where RELAY_HTTP_LISTEN says.
"""

import asyncio
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

import psycopg
import structlog
from cyclopts import App
from pydantic import BaseModel

from relay.config.loading import load
from relay.config.settings import DatabaseSettings
from relay.consume import Inbox, Message, Permanent, on
from relay.consume.pool import Partition, PartitionedConsumer, PoolPolicy
from relay.observe.log import set_up
from relay.probes.consumer import answering_for
from relay.servers.postgres.database import connect_async

LOAD = "SELECT customer_id, invoices, amount FROM billing.customer_total WHERE partition = %s"
SAVE = """
    INSERT INTO billing.customer_total AS total (customer_id, partition, invoices, amount) VALUES (%s, %s, 1, %s)
    ON CONFLICT (customer_id) DO UPDATE SET invoices = total.invoices + 1, amount = total.amount + excluded.amount
    RETURNING invoices, amount
"""

log = structlog.get_logger("examples.partitions")

app = App(name="python -m examples.partitions.member")


class Invoice(BaseModel):
    """What an InvoiceIssued says, as far as it matters here."""

    customer_id: str
    amount: Decimal


@dataclass
class Total:
    """What a customer has been billed."""

    invoices: int = 0
    amount: Decimal = Decimal(0)


# Of the partitions that we hold, by customer.
totals: dict[int, dict[str, Total]] = {}


async def load_totals(database: DatabaseSettings, partition: Partition) -> None:
    async with await connect_async(database) as connection:
        rows = await (await connection.execute(LOAD, [partition.number])).fetchall()
    totals[partition.number] = {customer: Total(invoices, amount) for customer, invoices, amount in rows}


async def forget_totals(partition: Partition) -> None:
    customers = totals.pop(partition.number)
    log.info("totals.forgotten", partition=partition.number, customers=len(customers), is_lost=partition.is_lost)


@on("InvoiceIssued")
async def add(message: Message[Invoice], connection: psycopg.AsyncConnection) -> None:
    invoice, partition = message.payload, message.headers["x-partition"]
    known = totals[partition].get(invoice.customer_id, Total())
    cursor = await connection.execute(SAVE, [invoice.customer_id, partition, invoice.amount])
    written = Total(*(await cursor.fetchone() or ()))
    if written != Total(known.invoices + 1, known.amount + invoice.amount):
        raise Permanent(f"{invoice.customer_id}: {known} and {invoice.amount} do not make {written}")
    totals[partition][invoice.customer_id] = written


@app.default
def main() -> None:
    """Work until SIGTERM or Ctrl-C; the partitions are handed over then."""
    settings = load().settings
    set_up(settings.log)
    member = PartitionedConsumer(
        "billing.totals",
        [add],
        inbox=Inbox(settings.database, "totals"),
        broker=settings.broker,
        pool=PoolPolicy(on_assigned=partial(load_totals, settings.database), on_revoked=forget_totals),
    )
    asyncio.run(work(member, settings.http.listen))


async def work(member: PartitionedConsumer, listen: str) -> None:
    async with answering_for(member, listen):
        await member.run()


if __name__ == "__main__":
    app()
