"""The demo's consumer, a process of its own: keep a projection of the invoices that were announced.

The projection's row and the inbox row are one transaction, and the message is acknowledged after its commit:
killed at any moment, it applies each invoice once.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path

import psycopg

from demo.queue import QUEUE
from relay.configuration import load
from relay.consume import Consumer, Inbox, Message, on
from relay.observe.log import set_up

NAME = "demo"

# No ON CONFLICT: should the inbox ever let a message through twice, this fails loudly.
PROJECT = """
    INSERT INTO billing.invoice_projection (invoice_id, customer_id, issued_on, quantity, amount)
    VALUES (%(invoice_id)s, %(customer_id)s, %(issued_on)s, %(quantity)s, %(amount)s)
"""


@on("InvoiceIssued")
async def project(message: Message, connection: psycopg.AsyncConnection) -> None:
    """Write the projection of one invoice."""
    invoice = json.loads(message.body, parse_float=Decimal)  # money stays exact
    await connection.execute(PROJECT, invoice)


def main(counts_file: Path) -> None:
    """Consume until SIGTERM; leave the counts of this process in `counts_file`."""
    settings = load().settings
    set_up(settings.log)
    consumer = Consumer(
        QUEUE,
        [project],
        inbox=Inbox(settings.database, NAME),
        broker=settings.broker,
        batch_size=1000,  # one transaction for as many as have come, which costs one sync to disk
        pipeline=True,
    )
    try:
        asyncio.run(consumer.run())
    finally:
        counts_file.write_text(json.dumps(asdict(consumer.counters)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
