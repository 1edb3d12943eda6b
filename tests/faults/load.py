"""Writers that outlive their database, a relay in this process, and what must hold afterwards.

The database numbers a customer's messages, under a lock that lasts until the transaction ends. So the numbers are the
true order of the commits. The same transactions write the business table, which shows which of them were committed,
even if the writer never got an answer.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, LiteralString
from uuid import UUID, uuid4

import aio_pika
import psycopg
from aio_pika.abc import AbstractQueue

from relay.config.settings import Settings
from relay.engine.node import Node
from tests.faults.checker import Checker, Findings, Invariant, assert_valid
from tests.faults.evidence import Delivered
from tests.faults.history import Ending, History, Written, digest
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

CUSTOMERS = [f"customer-{number}" for number in range(40)]
WRITERS, MESSAGES = 4, 3  # messages of a transaction
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
COMMITTED = "SELECT message_id FROM invoice"
PLACES = "SELECT message_id, customer, number FROM invoice"


@dataclass
class Load:
    """What writers commit to `url`, and the queue that gets everything, which is read through `broker_url`.

    Attributes:
        rate: messages a second, of all writers together; flat out without it.
        tried: messages that were inserted, however that ended.
        acknowledged: messages whose commit was answered.
        former: what was read from queues of other brokers, to which the relay sent before.
        delivered: of `settle`, all that was in the queue.
        repeats: of `settle`, messages that came before.
    """

    url: str
    broker_url: str
    queue: AbstractQueue
    rate: float | None = None
    tried: set[UUID] = field(default_factory=set)
    acknowledged: set[UUID] = field(default_factory=set)
    former: list[Delivered] = field(default_factory=list)
    delivered: set[UUID] = field(default_factory=set)
    repeats: int = 0
    _writing: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def comes_on(self, within: float = 30) -> None:
        """Wait until more messages are written and delivered."""
        written, sent = len(self.acknowledged) + STEP, await self._count(SENT) + STEP

        async def has_come_on() -> bool:
            return len(self.acknowledged) >= written and await self._count(SENT) >= sent

        await eventually(has_come_on, "writers and relay go on", within)

    async def finish(self, within: float = 30, *, forgotten: bool = False) -> None:
        """Stop writing, wait until all is sent, and check: nothing lost, invented, reordered or blamed.

        `forgotten`: the server may have lost commits that it had acknowledged, and the relay may have sent them.
        """
        findings = await self.settle(within, forgotten=forgotten)
        assert_valid(
            findings,
            Invariant.NOTHING_LOST,
            Invariant.NOTHING_INVENTED,
            Invariant.IN_ORDER,
            Invariant.REPEATS_ARE_THE_SAME,
        )

    async def settle(self, within: float = 30, *, forgotten: bool = False) -> Findings:
        """Stop writing, wait until all is sent, and return the checker's findings; see `finish`."""
        self._stop.set()
        await eventually(lambda: self._writing == 0, "the writers stop", within)
        await eventually(self._is_sent, "every row is sent at the first attempt", within)
        history = await self._history(forgotten=forgotten)
        checker = Checker(history, self.url, self.broker_url, [self.queue.name], business=COMMITTED)
        checker.deliveries += self.former
        findings = await checker.ask(within)
        self.delivered = {one.message_id for one in checker.deliveries}
        self.repeats = len(checker.deliveries) - len(self.delivered)
        return findings

    async def _history(self, *, forgotten: bool) -> History:
        """Return what was written. Only the server knows a message's number, and so its body."""
        places = {id_: (customer, number) for id_, customer, number in await self._rows(PLACES)}
        history: History = []
        for id_ in self.tried:
            customer, number = places.get(id_, (None, None))
            ending = Ending.COMMITTED if id_ in self.acknowledged else Ending.UNKNOWN
            if forgotten and customer is None:
                ending = Ending.FORGOTTEN
            body = digest(f'{{"number" : {number}}}'.encode())
            history.append(Written(id_, f"customer/{customer}" if customer else None, number, ending, body))
        return history

    async def write(self) -> None:
        """Write until `stop` is set, whatever happens to the server."""
        self._writing += 1
        due = asyncio.get_running_loop().time()
        while not self._stop.is_set():
            with suppress(psycopg.OperationalError, psycopg.InterfaceError):
                async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
                    while not self._stop.is_set():
                        await self._write_some(connection)
                        due = await self._await_turn(due)
            await asyncio.sleep(AGAIN_AFTER)
        self._writing -= 1

    async def _await_turn(self, due: float) -> float:
        """Sleep until a writer's next transaction; what a fault kept from being written is not caught up with."""
        if self.rate is None:
            return due
        now = asyncio.get_running_loop().time()
        due = max(due + WRITERS * MESSAGES / self.rate, now)
        await asyncio.sleep(due - now)
        return due

    async def _write_some(self, connection: psycopg.AsyncConnection) -> None:
        # Sorted: writers wait for each other's customers, never in a circle.
        messages = {customer: uuid4() for customer in sorted(random.sample(CUSTOMERS, MESSAGES))}
        self.tried.update(messages.values())
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


@asynccontextmanager
async def under_load(url: str, broker_url: str, *, rate: float | None = None) -> AsyncIterator[Load]:
    """Yield a load: writers on a migrated database, and a queue that gets what the relay publishes."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(TABLES)
        async with connection.cursor() as cursor:
            await cursor.executemany("INSERT INTO customer (name) VALUES (%s)", [(name,) for name in CUSTOMERS])
    async with await aio_pika.connect(broker_url) as broker:
        load = Load(url, broker_url, await declare_bound(await broker.channel(), "witness"), rate)
        async with asyncio.TaskGroup() as tasks:
            writers = [tasks.create_task(load.write(), name=f"writer-{number}") for number in range(WRITERS)]
            yield load
            for writer in writers:
                writer.cancel()


@asynccontextmanager
async def relaying(settings: Settings) -> AsyncIterator[Node]:
    """Yield a node that runs in this process; it drains at the end."""
    node = Node(settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run(), name="node")
        await eventually(node.is_ready, "ready", 30)
        yield node
        node.start_draining()
