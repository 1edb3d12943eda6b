"""Writers that outlive their database, a relay in this process, and what must hold afterwards.

The messages of a customer are numbered by the database, under a lock that is held until the transaction ends: the
numbers are the true order of the commits. The business table, written in the same transactions, tells which of those
were made, also of those whose writer never got an answer.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, LiteralString, NamedTuple
from uuid import UUID, uuid4

import aio_pika
import orjson
import psycopg
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue

from relay.engine.node import Node
from relay.settings import Settings
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

CUSTOMERS = [f"customer-{number}" for number in range(40)]
WRITERS = 4
STEP = 200  # messages by which writers and relay come on before and after each fault
AGAIN_AFTER = 0.05  # seconds

TABLES = """
    CREATE TABLE customer (name text PRIMARY KEY, messages integer NOT NULL DEFAULT 0);
    CREATE TABLE invoice (message_id uuid PRIMARY KEY, customer text NOT NULL, number integer NOT NULL);
"""
WRITE = """
    WITH next AS (
        UPDATE customer SET messages = messages + 1 WHERE name = %(customer)s RETURNING messages AS number
    ), written AS (
        INSERT INTO invoice SELECT %(id)s, %(customer)s, number FROM next RETURNING *
    )
    INSERT INTO outbox.message (message_id, aggregate_type, aggregate_id, event_type, payload)
    SELECT message_id, 'customer', customer, 'InvoiceIssued', json_build_object('number', number) FROM written
"""
SENT = "SELECT count(*) FROM outbox.message WHERE state = 'sent'"
UNSENT = "SELECT count(*) FROM outbox.message WHERE state <> 'sent' OR attempts > 0"
COMMITTED = "SELECT message_id, customer, number FROM invoice"


class Delivery(NamedTuple):
    """A message, as it was written or as it came."""

    message_id: UUID
    customer: str
    number: int


@dataclass
class Load:
    """What is written to `url`, and the queue that everything goes to.

    Attributes:
        acknowledged: messages whose commit was answered.
        repeats: of `finish`, messages that came before.
    """

    url: str
    queue: AbstractQueue
    acknowledged: set[UUID] = field(default_factory=set)
    repeats: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def comes_on(self, within: float = 30) -> None:
        """Wait until writers and relay have done some more."""
        written, sent = len(self.acknowledged) + STEP, await self._count(SENT) + STEP

        async def has_come_on() -> bool:
            return len(self.acknowledged) >= written and await self._count(SENT) >= sent

        await eventually(has_come_on, "writers and relay go on", within)

    async def finish(self, within: float = 30, *, forgotten: bool = False) -> None:
        """Stop writing, wait until all is sent, and see that nothing was lost, invented, reordered or blamed.

        `forgotten`: the server may have lost commits that it had acknowledged, and the relay may have sent them.
        """
        self._stop.set()
        await eventually(self._is_sent, "every row is sent at the first attempt", within)
        committed = {Delivery(*row) for row in await self._rows(COMMITTED)}
        deliveries = await self._deliveries()
        self.repeats = len(deliveries) - len(set(deliveries))
        known = [delivery for delivery in deliveries if delivery in committed]

        assert forgotten or self.acknowledged <= {each.message_id for each in committed}, "the server lost commits"
        assert forgotten or len(known) == len(deliveries)
        assert set(known) == committed
        assert out_of_order(known) == []

    async def write(self) -> None:
        """Write until told to stop, whatever becomes of the server."""
        while not self._stop.is_set():
            with suppress(psycopg.OperationalError, psycopg.InterfaceError):
                async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
                    while not self._stop.is_set():
                        await self._write_some(connection)
            await asyncio.sleep(AGAIN_AFTER)

    async def _write_some(self, connection: psycopg.AsyncConnection) -> None:
        # Sorted: writers wait for each other's customers, never in a circle.
        messages = {customer: uuid4() for customer in sorted(random.sample(CUSTOMERS, 3))}
        async with connection.transaction(), connection.cursor() as cursor:
            await cursor.executemany(WRITE, [{"customer": name, "id": id_} for name, id_ in messages.items()])
        self.acknowledged.update(messages.values())

    async def _is_sent(self) -> bool:
        return await self._count(UNSENT) == 0

    async def _count(self, query: LiteralString) -> int:
        with suppress(psycopg.OperationalError):
            return int((await self._rows(query))[0][0])
        return -1  # nobody can tell at this moment

    async def _rows(self, query: LiteralString) -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            return await (await connection.execute(query)).fetchall()

    async def _deliveries(self) -> list[Delivery]:
        expected = (await self.queue.declare()).message_count or 0
        deliveries: list[Delivery] = []

        async def take(message: AbstractIncomingMessage) -> None:
            number = orjson.loads(message.body)["number"]
            deliveries.append(Delivery(UUID(message.message_id), str(message.headers["x-aggregate-id"]), number))

        await self.queue.consume(take, no_ack=True)
        await eventually(lambda: len(deliveries) >= expected, f"{expected} messages are read", 30)
        return deliveries


@asynccontextmanager
async def under_load(url: str, broker_url: str) -> AsyncIterator[Load]:
    """Write to a migrated database, and bind a queue to what the relay publishes."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(TABLES)
        async with connection.cursor() as cursor:
            await cursor.executemany("INSERT INTO customer (name) VALUES (%s)", [(name,) for name in CUSTOMERS])
    async with await aio_pika.connect(broker_url) as broker:
        load = Load(url, await declare_bound(await broker.channel(), "witness"))
        async with asyncio.TaskGroup() as tasks:
            writers = [tasks.create_task(load.write(), name=f"writer-{number}") for number in range(WRITERS)]
            yield load
            for writer in writers:
                writer.cancel()


@asynccontextmanager
async def relaying(settings: Settings) -> AsyncIterator[Node]:
    """Run a node in this process, and drain it."""
    node = Node(settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run(), name="node")
        await eventually(node.is_ready, "ready", 30)
        yield node
        node.start_draining()


def out_of_order(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Give what came for the first time after a later message of its customer had."""
    highest: defaultdict[str, int] = defaultdict(int)
    seen: set[UUID] = set()
    late = []
    for delivery in deliveries:
        if delivery.message_id not in seen and delivery.number < highest[delivery.customer]:
            late.append(delivery)
        seen.add(delivery.message_id)
        highest[delivery.customer] = max(highest[delivery.customer], delivery.number)
    return late
