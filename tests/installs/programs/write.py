"""Write events with what comes without any extra, on a connection of each kind."""

import asyncio
import importlib
import sys
from contextlib import suppress

import psycopg

from relay.errors import MissingExtraError
from relay.outbox import Event, add, add_many

EVENT = Event("customer", "17", "InvoiceIssued", {"invoice": 42})


async def write(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await add(connection, Event("customer", "17", "InvoicePaid", {"invoice": 42}))


database = sys.argv[1]
with psycopg.connect(database) as connection:
    add(connection, EVENT)
    add_many(connection, [Event("customer", "17", "InvoiceSeen", b"[]") for _ in range(100)])
asyncio.run(write(database))
with psycopg.connect(database) as connection:
    assert connection.execute("SELECT count(*) FROM outbox.message").fetchone() == (102,)
with suppress(MissingExtraError):
    importlib.import_module("relay.consume")
    raise AssertionError("the consumer came without its extra")
