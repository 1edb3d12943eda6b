"""Clients without a relay, which send one message or row after the other: they show how long a server pauses."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, pairwise

import aiormq
import psycopg
from aiormq.exceptions import AMQPError, ChannelInvalidStateError, DeliveryError

AGAIN_AFTER, CONNECT_WITHIN = 0.02, 2.0  # seconds
# What the library raises when the connection goes away: CancelledError as well.
LOST = (AMQPError, ChannelInvalidStateError, OSError, asyncio.CancelledError)
QUEUE = "reference"
TABLE = "CREATE TABLE reference (at timestamptz NOT NULL DEFAULT now())"
WRITE = "INSERT INTO reference DEFAULT VALUES"


def longest_pause(moments: Sequence[float], since: float = 0.0) -> float:
    """Return the longest time between neighbouring moments, of those that end after `since`; 0 if there is no such."""
    return max((later - earlier for earlier, later in pairwise(moments) if later > since), default=0.0)


class PlainClient(ABC):
    """A client that never gives up: after each failure it connects again at once.

    Attributes:
        answered_at: the moments at which the server confirmed a message or row (Unix time).
    """

    def __init__(self) -> None:
        self.answered_at: list[float] = []

    @property
    def pause(self) -> float:
        return longest_pause(self.answered_at)

    @abstractmethod
    async def run(self) -> None:
        """Send until cancelled."""

    def _note(self) -> None:
        self.answered_at.append(time.time())


class PlainPublisher(PlainClient):
    """Publishes with confirms to its own quorum queue, through the first of `urls` that answers.

    It uses aiormq: a failed connection of aio_pika warns when it is collected, which no test can predict.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__()
        self._urls = urls

    async def declare(self, url: str) -> None:
        """Declare the queue, whose leader is the node of this URL."""
        async with await aiormq.connect(url) as connection:
            channel = await connection.channel()
            await channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})

    async def run(self) -> None:
        for url in cycle(self._urls):
            with suppress(*LOST):
                async with asyncio.timeout(CONNECT_WITHIN):
                    connection = await aiormq.connect(url)
                try:
                    await self._publish(await connection.channel())
                finally:
                    await connection.close()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            await asyncio.sleep(AGAIN_AFTER)

    async def _publish(self, channel: aiormq.abc.AbstractChannel) -> None:
        while True:
            with suppress(DeliveryError):  # no leader for now
                await channel.basic_publish(b"", routing_key=QUEUE)
                self._note()
            await asyncio.sleep(AGAIN_AFTER)


class PlainWriter(PlainClient):
    """Commits rows to its own table; `url` may name several hosts."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    async def create(self) -> None:
        """Create the table."""
        async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
            await connection.execute(TABLE)

    async def run(self) -> None:
        while True:
            with suppress(psycopg.OperationalError, psycopg.InterfaceError):
                async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
                    while True:
                        await connection.execute(WRITE)
                        self._note()
                        await asyncio.sleep(AGAIN_AFTER)
            await asyncio.sleep(AGAIN_AFTER)
