"""The consumer of `make console`, a separate process: it applies orders, and fails on some as a real one does."""

import asyncio

import psycopg

from relay.config.loading import load
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Permanent, Retries, on
from relay.observe.log import set_up

NAME = "shop"
QUEUE = "shop.orders"
UNKNOWN = "customer-unknown"  # whose orders can never be applied
TAXED = "customer-taxed"  # whose orders wait for the tax office
LATER = Retries(initial=600.0, maximum=600.0)  # long enough to be seen

TABLE = """
    CREATE SCHEMA IF NOT EXISTS shop;
    CREATE TABLE IF NOT EXISTS shop.event (message_id uuid PRIMARY KEY, event_type text, customer text, payload jsonb)
"""
APPLY = "INSERT INTO shop.event VALUES (%s, %s, %s, %s)"


@on("OrderPlaced", "OrderScanned", "RefundPaid")
async def apply(message: Message, connection: psycopg.AsyncConnection) -> None:
    """Note what happened to a customer."""
    if message.aggregate_id == UNKNOWN:
        raise Permanent("no such customer")
    if message.aggregate_id == TAXED:
        raise ConnectionError("the tax office does not answer")
    values = [message.message_id, message.type, message.aggregate_id, message.body.decode()]
    await connection.execute(APPLY, values)


def main() -> None:
    """Consume until SIGTERM."""
    settings = load().settings
    set_up(settings.log)
    inbox = Inbox(settings.database, NAME)
    consumer = Consumer(QUEUE, [apply], inbox=inbox, broker=settings.broker, failures=FailurePolicy(retries=LATER))
    asyncio.run(consumer.run())


if __name__ == "__main__":
    main()
