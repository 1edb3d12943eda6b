"""A table to write into, a queue to read from, and a node between them in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from psycopg.sql import SQL, Identifier
from psycopg.types.json import Json

from relay.config.settings import DatabaseSettings, RelaySettings, Settings
from relay.engine.node import Node
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read.tail import Tail
from relay.engine.row import Outcome, Settled
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession
from tests.engine.follower import IN_ORDER, Follow, Follower, unhurried
from tests.support.depth import depth
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

NO_SWEEP = {"sweep_interval": 3600.0, "poll_interval": 0.05}  # what the sweep would find has to be found without it

RunNode = Callable[..., AbstractAsyncContextManager[Node]]


class Outbox:
    """The table as a writer and an onlooker see it."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self.connection = connection

    async def insert(self, key: str | None = "1", **columns: Any) -> int:
        """Write one row and give its id."""
        values: dict[str, Any] = {
            "aggregate_type": "customer",
            "aggregate_id": key,
            "event_type": "InvoiceIssued",
            "payload": Json({"key": key}),
            **columns,
        }
        if "payload_bytes" in columns:
            del values["payload"]
        statement = SQL("INSERT INTO outbox.message ({}) VALUES ({}) RETURNING id").format(
            SQL(", ").join(map(Identifier, values)), SQL(", ").join(SQL("%s") for _ in values)
        )
        cursor = await self.connection.execute(statement, list(values.values()))
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])

    async def insert_faulty(self, key: str | None = "1") -> int:
        """Write a row that the relay cannot send, until `mend`: no AMQP header may have so long a name."""
        return await self.insert(key, headers=Json({"x" * 129: True}))

    async def mend(self, id_: int) -> None:
        await self.connection.execute("UPDATE outbox.message SET headers = NULL WHERE id = %s", [id_])

    async def insert_many(self, number: int, *, keys: int = 100, payload: str = '{"n": 1}') -> None:
        await self.connection.execute(
            "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
            " SELECT 'customer', (n %% %s)::text, 'InvoiceIssued', %s::json FROM generate_series(1, %s) AS n",
            [keys, payload, number],
        )

    async def ids(self, state: str) -> list[int]:
        cursor = await self.connection.execute("SELECT id FROM outbox.message WHERE state = %s ORDER BY id", [state])
        return [row[0] for row in await cursor.fetchall()]

    async def is_empty(self) -> bool:
        return not await self.ids("pending")

    async def are_aside(self, ids: list[int], words: str = "") -> bool:
        """Whether just these wait in quarantine; now and then one of them is on its way as a probe."""
        cursor = await self.connection.execute(
            "SELECT id FROM outbox.message"
            " WHERE state = 'quarantined' AND attempts = 0 AND strpos(last_error, %s) > 0 ORDER BY id",
            [words],
        )
        return [row[0] for row in await cursor.fetchall()] == ids

    async def is_at_rest(self) -> bool:
        # One snapshot: a row may go from the one state to the other.
        waiting = "SELECT FROM outbox.message WHERE state IN ('pending', 'quarantined') LIMIT 1"
        return (await self.connection.execute(waiting)).rowcount == 0

    async def quarantined_routes(self) -> list[tuple[str, str]]:
        cursor = await self.connection.execute("SELECT exchange, routing_key FROM outbox.quarantine ORDER BY id")
        return await cursor.fetchall()

    async def column(self, name: str, id_: int) -> Any:
        statement = SQL("SELECT {} FROM outbox.message WHERE id = %s").format(Identifier(name))
        row = await (await self.connection.execute(statement, [id_])).fetchone()
        assert row is not None
        return row[0]

    async def keys_of_other_lanes(self) -> list[str]:
        """Return keys whose lanes differ from the lane of key 0."""
        cursor = await self.connection.execute(
            "SELECT n::text FROM generate_series(1, 12) AS n"
            " WHERE hashtextextended('customer/' || n, 0) & 15 <> hashtextextended('customer/0', 0) & 15"
        )
        return [row[0] for row in await cursor.fetchall()]

    async def has_sleeping_relay(self) -> bool:
        """Whether one relay sleeps, and so asks writers to ring."""
        cursor = await self.connection.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return await cursor.fetchone() == (1,)


class Reader:
    """A queue bound to everything that the default exchange gets."""

    def __init__(self, channel: AbstractChannel, queue: AbstractQueue) -> None:
        self.channel = channel
        self.queue = queue

    async def drain(self, number: int, within: float = 60) -> list[AbstractIncomingMessage]:
        """Take what is in the queue, which must become exactly `number` messages."""
        messages = await self._take(len, number, within)
        assert len(messages) == number
        return messages

    async def drain_different(self, number: int, within: float = 60) -> list[AbstractIncomingMessage]:
        """Take messages until `number` different ones have come. Repeats are among them, and may follow."""
        return await self._take(lambda messages: len({each.message_id for each in messages}), number, within)

    async def _take(
        self, count: Callable[[list[AbstractIncomingMessage]], int], number: int, within: float
    ) -> list[AbstractIncomingMessage]:
        messages: list[AbstractIncomingMessage] = []

        async def take(message: AbstractIncomingMessage) -> None:
            messages.append(message)

        tag = await self.queue.consume(take, no_ack=True)
        await eventually(lambda: count(messages) >= number, f"{number} messages in the queue", within)
        await self.queue.cancel(tag)
        return messages

    async def everything(self) -> list[AbstractIncomingMessage]:
        """Take all that was confirmed: also repeats, whose number nobody knows."""
        return await self.drain(await depth(self.count))

    async def count(self) -> int | None:
        """Return how many messages wait in the queue."""
        declared = await self.channel.declare_queue(self.queue.name, passive=True)
        return declared.declaration_result.message_count

    async def ids(self, number: int) -> list[int]:
        return [int(str(message.headers["x-outbox-id"])) for message in await self.drain(number)]


@pytest.fixture
async def outbox(database_url: str) -> AsyncIterator[Outbox]:
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        yield Outbox(connection)


@pytest.fixture
async def channel(broker_url: str) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(broker_url) as connection:
        yield await connection.channel()


@pytest.fixture
async def queue(channel: AbstractChannel) -> Reader:
    return Reader(channel, await declare_bound(channel, "events"))


@pytest.fixture
def run_node(settings: Settings) -> RunNode:
    """`async with run_node(max_attempts=2) as node:` runs a node with these relay settings, and drains it."""

    @asynccontextmanager
    async def run(base: Settings = settings, **relay: Any) -> AsyncIterator[Node]:
        quick = {"backoff_initial": 0.05, "backoff_max": 0.2, "heartbeat_interval": 0.2, **relay}
        node = Node(base.model_copy(update={"relay": RelaySettings(**{**base.relay.model_dump(), **quick})}))
        running = asyncio.create_task(node.run())
        try:
            yield node
        finally:
            node.start_draining()
            await running

    return run


@pytest.fixture
def refused_by_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the relay cannot send counts as refused by the broker: tried again, later and later.

    A broker refuses a row by closing the channel, which disturbs the others. Tests of the backoff want the one without
    the other; tests/faults/test_broker_refusals.py has the real thing.
    """
    settle = Sender.settle

    def refuse(sender: Sender, settled: Settled) -> None:
        if settled.outcome is Outcome.UNSENDABLE:
            settled = settled._replace(outcome=Outcome.REFUSED)
        settle(sender, settled)

    monkeypatch.setattr(Sender, "settle", refuse)


@pytest.fixture
async def follow(database: DatabaseSettings) -> AsyncIterator[Follow]:
    """`await follow(max_window_rows=...)` starts to read all lanes."""
    async with await LaneSession.open(database) as session:
        session.lanes.take(await lock_lanes(session))
        followers: list[tuple[Follower, asyncio.Task[None]]] = []

        async def start(**settings: float) -> Follower:
            follower = Follower(Tail(session, RelaySettings(**{**NO_SWEEP, **settings}), IN_ORDER, unhurried(session)))
            followers.append((follower, asyncio.create_task(follower.run())))
            followers.append((follower, asyncio.create_task(follower.write(session))))
            return follower

        yield start
        for follower, task in followers:
            follower.drain.set()
            follower.tail.wake()
            await task


@pytest.fixture
async def writer(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A second writer, with a separate transaction."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        yield connection
