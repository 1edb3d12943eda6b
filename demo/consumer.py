"""The demo's consumer, a separate process: keep a projection of the invoices that were announced.

The projection's row and the inbox row are one transaction, and the message is acknowledged after its commit.
Killed at any moment, it applies each invoice once.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import psycopg

from demo.queue import QUEUE
from relay.config.loading import load
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.observe.log import set_up

NAME = "demo"
WRITE_INTERVAL = 0.2  # seconds

# No ON CONFLICT: should the inbox ever let a message through twice, this fails loudly.
PROJECT = """
    INSERT INTO billing.invoice_projection (invoice_id, customer_id, issued_on, quantity, amount)
    SELECT invoice_id, customer_id, issued_on, quantity, amount
    FROM json_populate_recordset(NULL::billing.invoice_projection, %s::json)
"""


@on("InvoiceIssued", batch=True)
async def project(messages: Sequence[Message], connection: psycopg.AsyncConnection) -> None:
    """Write the projection of some invoices; their JSON goes to PostgreSQL as it is, so the money stays exact."""
    await connection.execute(PROJECT, ["[" + ",".join(message.body.decode() for message in messages) + "]"])


def main(counts_file: Path) -> None:
    """Consume until SIGTERM; keep the counts of this process in `counts_file`."""
    settings = load().settings
    set_up(settings.log)
    consumer = Consumer(
        QUEUE,
        [project],
        inbox=Inbox(settings.database, NAME),
        broker=settings.broker,
        # One transaction for as many as have come, which costs one sync to disk.
        work=WorkPolicy(batch_size=1000, pipeline=True),
    )
    asyncio.run(_consume(consumer, counts_file))


async def _consume(consumer: Consumer, counts_file: Path) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(_write_often(consumer, counts_file), name="counts")
            await consumer.run()
            writing.cancel()
    finally:
        _write(consumer, counts_file)


async def _write_often(consumer: Consumer, counts_file: Path) -> None:
    while True:
        _write(consumer, counts_file)
        await asyncio.sleep(WRITE_INTERVAL)


def _write(consumer: Consumer, counts_file: Path) -> None:
    """Write the counts so that a reader finds either the old ones or the new ones."""
    beside = counts_file.with_suffix(".new")
    beside.write_text(json.dumps(consumer.counters.for_log()))
    beside.replace(counts_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
