"""The consumer that a drill kills: python -m tests.faults.projector, configured as the relay is."""

import asyncio

import psycopg

from relay.config.loading import load
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.observe.log import set_up

QUEUE = "projector"

# No ON CONFLICT: a message that the inbox let through twice must fail.
PROJECT = "INSERT INTO billing.invoice_projection VALUES (%(invoice_id)s, %(customer_id)s, %(number)s, %(amount)s)"


@on("InvoiceIssued")
async def project(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute(PROJECT, message.json())


def main() -> None:
    settings = load().settings
    set_up(settings.log)
    inbox = Inbox(settings.database, "projector")
    consumer = Consumer(
        QUEUE,
        [project],
        inbox=inbox,
        broker=settings.broker,
        work=WorkPolicy(concurrency=3, batch_size=20, pipeline=True),
    )
    asyncio.run(consumer.run())


if __name__ == "__main__":
    main()
