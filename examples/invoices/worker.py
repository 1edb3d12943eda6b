"""Keep a projection of the invoices that were issued, each once: python -m examples.invoices.worker.

The projection's row and the inbox row (`outbox.processed_message`) are one transaction, and the message is acknowledged
after its commit. Servers are found as those of `relay run` (RELAY_DATABASE_URL, RELAY_BROKER_URL, RELAY_CONFIG); probes
and metrics are where RELAY_HTTP_LISTEN says.
"""

import asyncio
from datetime import date
from decimal import Decimal
from math import inf

import psycopg
from cyclopts import App
from pydantic import BaseModel, Field

from relay.config.loading import load
from relay.config.settings import Settings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.observe.log import set_up
from relay.probes.consumer import answering_for

QUEUE = "billing.invoices"

# No ON CONFLICT: should the inbox ever let a message through twice, this fails loudly.
PROJECT = """
    INSERT INTO billing.invoice_projection (invoice_id, customer_id, issued_on, quantity, amount)
    VALUES (%s, %s, %s, %s, %s)
"""

app = App(name="python -m examples.invoices.worker")


class Invoice(BaseModel):
    """What an InvoiceIssued says; a payload that does not is a dead letter at once."""

    invoice_id: str
    customer_id: str
    issued_on: date
    quantity: int = Field(gt=0)
    amount: Decimal = Field(ge=0, max_digits=12, decimal_places=2)


@on("InvoiceIssued")
async def project(message: Message[Invoice], connection: psycopg.AsyncConnection) -> None:
    invoice = message.payload
    row = (invoice.invoice_id, invoice.customer_id, invoice.issued_on, invoice.quantity, invoice.amount)
    await connection.execute(PROJECT, row)


@app.default
def main(*, concurrency: int = 4) -> None:
    """Work until SIGTERM or Ctrl-C; the running transactions are finished.

    Parameters
    ----------
    concurrency
        Transactions at the same time, and messages that the broker gives to this process: it holds no more.
    """
    settings = load().settings
    set_up(settings.log)
    asyncio.run(work(settings, concurrency))


async def work(settings: Settings, concurrency: int) -> None:
    consumer = Consumer(
        QUEUE,
        [project],
        inbox=Inbox(settings.database, "invoices"),
        broker=settings.broker,
        work=WorkPolicy(concurrency=concurrency),
        declare=False,  # `relay topology apply` has made the queue of the dead letters
        start_timeout=inf,  # servers that are not there yet are waited for
    )
    async with answering_for(consumer, settings.http.listen):
        await consumer.run()


if __name__ == "__main__":
    app()
