"""A consumer that answers during the test, and a handler that hangs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from relay.consume import Consumer, Message, on
from relay.probes.consumer import answering_for
from relay.testing.servers.process import free_port
from tests.consume.conftest import inbox, queue, table
from tests.consume.effects import count, running
from tests.http.site import Site

__all__ = ["inbox", "queue", "table"]  # the consumer's fixtures

ORDERS = pytest.mark.parametrize("order", ["hold", "skip"])


class Hanging:
    """A handler that waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.begun = 0

        @on("Counted")
        async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
            self.begun += 1
            await self.let_go.wait()
            await count(message, connection)

        self.handle = handle


@asynccontextmanager
async def serving(consumer: Consumer) -> AsyncIterator[Site]:
    """Run a consumer, and stop it."""
    address = f"127.0.0.1:{free_port()}"
    async with answering_for(consumer, address), running(consumer):
        yield Site(address)
