"""A queue with messages as the relay sends them, a table for effects, and consumers that run during the test."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, LiteralString, Protocol
from uuid import uuid4

import aio_pika
import psycopg
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, FieldValue
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.consume.apply.handlers import AsyncHandler, SyncHandler, collect_handlers
from relay.consume.apply.inbox import Applied
from relay.consume.apply.transactions_factory import open_transactions
from relay.consume.message import Delivery
from relay.consume.pool import PartitionedConsumer
from tests.support.eventually import eventually

QUEUE = "billing"
CONSUMER = "projection"
NO_HEADERS: Mapping[str, FieldValue] = MappingProxyType({})

EFFECTS = """
    CREATE TABLE effect (
        position bigint GENERATED ALWAYS AS IDENTITY,
        message_id uuid NOT NULL,
        key text,
        number integer NOT NULL
    )
"""


@dataclass
class Queue:
    """The queue of this test, and who fills it."""

    channel: AbstractChannel
    name: str = QUEUE

    async def send(
        self,
        body: int | bytes,
        *,
        key: str | None = "a",
        message_id: str | None = None,
        event_type: str = "Counted",
        timestamp: datetime | None = None,
        headers: Mapping[str, FieldValue] = NO_HEADERS,
    ) -> str:
        """Publish one message, wait for its confirm and give its id."""
        message_id = message_id or str(uuid4())
        of_key = {} if key is None else {"x-aggregate-id": key}
        await self.channel.default_exchange.publish(
            aio_pika.Message(
                b"%d" % body if isinstance(body, int) else body,
                message_id=message_id,
                type=event_type,
                content_type="application/json",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                timestamp=timestamp,
                headers={"x-aggregate-type": "counter", **of_key, **headers},
            ),
            self.name,
            mandatory=True,
        )
        return message_id

    async def send_all(self, numbers: Iterable[int], *, key: str = "a") -> None:
        for number in numbers:
            await self.send(number, key=key)

    async def declare(self, kind: str = "quorum", **arguments: Any) -> None:
        await self.channel.declare_queue(self.name, durable=True, arguments={"x-queue-type": kind, **arguments})

    async def dead(self) -> list[AbstractIncomingMessage]:
        """Take the dead letters out."""
        return await self._take(f"{self.name}.dead")

    async def ready(self) -> list[AbstractIncomingMessage]:
        """Take out what waits to be delivered."""
        return await self._take(self.name)

    async def dead_count(self) -> int:
        declared = await self.channel.declare_queue(f"{self.name}.dead", passive=True)
        return declared.declaration_result.message_count or 0

    async def _take(self, name: str) -> list[AbstractIncomingMessage]:
        queue = await self.channel.get_queue(name)
        taken = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            taken.append(message)
        return taken

    async def ready_count(self) -> int:
        """Return how many messages wait to be delivered; those that are with a consumer do not."""
        declared = await self.channel.declare_queue(self.name, passive=True)
        return declared.declaration_result.message_count or 0

    async def consumer_count(self) -> int:
        declared = await self.channel.declare_queue(self.name, passive=True)
        return declared.declaration_result.consumer_count or 0

    async def drained(self) -> bool:
        """Wait until the queue is empty and nobody consumes: a quorum queue notices the end of a channel a bit late."""

        async def is_so() -> bool:
            return not await self.ready_count() and not await self.consumer_count()

        await eventually(is_so, "the queue is empty, and nobody consumes", within=5)
        return True


@dataclass
class Table:
    """What the handlers did, read by another connection."""

    connection: psycopg.AsyncConnection

    async def numbers(self, key: str | None = None) -> list[int]:
        """Return the numbers in the order in which they were applied."""
        cursor = await self.connection.execute(
            "SELECT number FROM effect WHERE %(key)s::text IS NULL OR key = %(key)s ORDER BY position", {"key": key}
        )
        return [number for (number,) in await cursor.fetchall()]

    async def inbox_count(self) -> int:
        return await self._count("SELECT count(*) FROM outbox.processed_message")

    async def held_count(self) -> int:
        return await self._count("SELECT count(*) FROM outbox.held_message")

    async def begun_count(self) -> int:
        return await self._count("SELECT count(*) FROM outbox.begun_message")

    async def make_due(self) -> None:
        """Let the time of each held message come."""
        await self.connection.execute("UPDATE outbox.held_message SET due_at = now()")

    async def end_sessions(self) -> None:
        """End the sessions of all consumers of this database, as an administrator does."""
        await self.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'outbox-consumer%'"
        )

    async def _count(self, statement: LiteralString) -> int:
        row = await (await self.connection.execute(statement)).fetchone()
        assert row is not None
        return int(row[0])


@on("Counted")
async def count(message: Message, connection: psycopg.AsyncConnection) -> None:
    """Note each call that is committed."""
    await connection.execute(
        "INSERT INTO effect (message_id, key, number) VALUES (%s, %s, %s)",
        (message.message_id, message.aggregate_id, message.json()),
    )


@on("Counted", batch=True)
async def count_together(messages: Sequence[Message], connection: psycopg.AsyncConnection) -> None:
    """Note them in one statement."""
    columns = zip(*((m.message_id, m.aggregate_id, m.json()) for m in messages), strict=True)
    await connection.execute(
        "INSERT INTO effect (message_id, key, number) SELECT * FROM unnest(%s::uuid[], %s::text[], %s::integer[])",
        [list(column) for column in columns],
    )


def received(body: bytes = b"1", *, event_type: str = "Counted", **values: Any) -> Message:
    """Return a message as a handler would get it, without a broker."""
    fields = {
        "message_id": uuid4(),
        "aggregate_type": "counter",
        "aggregate_id": "a",
        "content_type": "application/json",
        "timestamp": None,
        "routing_key": QUEUE,
        "redelivered": False,
        "headers": {},
        "consumer_name": CONSUMER,
    }
    return Message(type=event_type, body=body, payload=body, **{**fields, **values})


def delivered(number: int, *, key: str = "a", **values: Any) -> Delivery:
    """Return a delivery of this number, without a broker."""
    message = received(b"%d" % number, aggregate_id=key, **values)
    properties = Basic.Properties(message_id=str(message.message_id), message_type=message.type)
    came = Basic.Deliver("", number, redelivered=False, exchange="", routing_key=message.routing_key)
    header = ContentHeader(properties=properties)
    original = DeliveredMessage(delivery=came, header=header, body=message.body, channel=None)  # type: ignore[arg-type]
    return Delivery(number, key, message, original)


class MakeConsumer(Protocol):
    """Make a consumer of the test's queue, with its inbox; the keywords after `work` are those of FailurePolicy."""

    def __call__(
        self,
        *handlers: AsyncHandler | SyncHandler,
        work: WorkPolicy = WorkPolicy(),  # noqa: B008 (immutable)
        **failures: Any,
    ) -> Consumer: ...


class Stumbling:
    """A handler that writes and then fails on the numbers it is told, as often as it is told."""

    def __init__(self, failures: dict[int, int], error: BaseException | None = None) -> None:
        self.calls: Counter[int] = Counter()
        self.failures = Counter(failures)
        self._error = error or RuntimeError("not today")

        @on("Counted")
        async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
            number = message.json()
            self.calls[number] += 1
            await count(message, connection)
            if self.failures[number]:
                self.failures[number] -= 1
                raise self._error

        self.handle = handle


@asynccontextmanager
async def running(consumer: Consumer | PartitionedConsumer) -> AsyncIterator[asyncio.Task[None]]:
    """Run a consumer during the test, and stop it; its error is the test's."""
    task = asyncio.create_task(consumer.run(signals=False))
    try:
        yield task
    finally:
        consumer.stop()
        await asyncio.wait([task])
    task.result()


async def apply(inbox: Inbox, handler: Callable[..., Any]) -> Applied:
    """Apply one message in a separate transaction, without a broker."""
    transactions = open_transactions(inbox, collect_handlers([on("Counted")(handler)]))
    await transactions.open()
    try:
        return await transactions.apply([delivered(1)])
    finally:
        await transactions.close()
