"""A small drill: a table to write into, a recorder in front of the broker, a relay in this process, and the checker."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import psycopg
from aio_pika.abc import AbstractChannel
from pamqp.common import FieldTable
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import RelaySettings, Settings
from relay.engine.node import Node
from tests.faults.checker import Checker
from tests.faults.history import Ending, History, Injected, Record, Written, digest
from tests.faults.recorder import Recorder
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

QUEUE = "events"
QUICK = {"backoff_initial": 0.05, "backoff_max": 0.2, "heartbeat_interval": 0.2, "max_attempts": 1000}

INSERT = """
    INSERT INTO outbox.message (
        message_id, aggregate_type, aggregate_id, event_type, payload, exchange, routing_key
    )
    VALUES (%(message_id)s, 'customer', %(key)s, 'InvoiceIssued', %(payload)s, %(exchange)s, %(routing_key)s)
"""


@dataclass(slots=True)
class Scene:
    """What a drill needs. `history` records everything that happens in it."""

    settings: Settings
    connection: psycopg.AsyncConnection  # the writer's
    channel: AbstractChannel  # the drill's own, not recorded
    history: History
    recorder: Recorder
    checker: Checker
    numbers: dict[str, int] = field(default_factory=dict)

    async def write(self, *keys: str, exchange: str | None = None, routing_key: str | None = None) -> list[UUID]:
        """Commit a message for each key, in one transaction, and return their ids."""
        async with self.connection.transaction():
            written = [await self.insert(self.connection, key, exchange, routing_key) for key in keys]
        self.history.extend(written)
        return [one.message_id for one in written]

    async def insert(
        self, connection: psycopg.AsyncConnection, key: str, exchange: str | None = None, routing_key: str | None = None
    ) -> Written:
        """Insert the next message of a key, and return its record, for `history` after the commit."""
        number = self.numbers[key] = self.numbers.get(key, 0) + 1
        payload = f'{{"number": {number}}}'
        message_id = uuid4()
        await connection.execute(
            INSERT,
            {
                "message_id": message_id,
                "key": key,
                "payload": payload,
                "exchange": exchange,
                "routing_key": routing_key,
            },
        )
        return Written(message_id, f"customer/{key}", number, Ending.COMMITTED, digest(payload.encode()))

    @property
    def database_url(self) -> str:
        return self.settings.database.url.get_secret_value()

    @asynccontextmanager
    async def relay(self, **relay: Any) -> AsyncIterator[Node]:
        """Yield a relay in this process, connected through the recorder; it drains at the end."""
        chosen = RelaySettings(**{**self.settings.relay.model_dump(), **QUICK, **relay})
        node = Node(self.settings.model_copy(update={"relay": chosen}))
        running = asyncio.create_task(node.run())
        try:
            await eventually(node.is_ready, "the relay is ready")
            yield node
        finally:
            node.start_draining()
            await running
            self.history.append(Injected("relay stopped", forgets=True))

    async def states(self) -> dict[UUID, str]:
        """Return the state of each message in the table."""
        cursor = await self.connection.execute("SELECT message_id, state FROM outbox.message")
        return dict(await cursor.fetchall())

    async def has_queued(self, count: int) -> bool:
        """Whether the queue holds exactly `count` messages."""
        declared = await self.channel.declare_queue(QUEUE, passive=True)
        return declared.declaration_result.message_count == count

    def times(self, kind: type[Record]) -> int:
        """Return how many records of this kind the history has."""
        return sum(isinstance(record, kind) for record in self.history)

    async def is_empty(self) -> bool:
        return "pending" not in (await self.states()).values()


@asynccontextmanager
async def scene(
    settings: Settings, *, more_queues: Sequence[str] = (), arguments: FieldTable | None = None
) -> AsyncIterator[Scene]:
    """Yield a scene.

    Args:
        more_queues: further queues for the checker to read; the drill declares them.
        arguments: of the queue that gets all that the relay publishes.
    """
    database_url, url = settings.database.url.get_secret_value(), URL(settings.broker.url.get_secret_value())
    history: History = []
    async with (
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection,
        await aio_pika.connect(url) as broker,
        Recorder(history, str(url.host), url.port or 5672) as recorder,
    ):
        channel = await broker.channel()
        await declare_bound(channel, QUEUE, settings.broker.exchange, arguments)
        through = SecretStr(str(url.with_host("127.0.0.1").with_port(recorder.port)))
        recorded = settings.broker.model_copy(update={"url": through})
        checker = Checker(history, database_url, str(url), [QUEUE, *more_queues])
        yield Scene(settings.model_copy(update={"broker": recorded}), connection, channel, history, recorder, checker)
