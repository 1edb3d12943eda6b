"""A queue with messages as the relay sends them, a table for effects, and consumers that run beside the test."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import aio_pika
import psycopg
from aio_pika.abc import AbstractChannel
from pydantic import SecretStr
from yarl import URL

from relay.consume import Backoff, Consumer, Message, on
from relay.settings import BrokerSettings

QUEUE = "billing"
CONSUMER = "projection"

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
        self, number: int, *, key: str | None = "a", message_id: str | None = None, event_type: str = "Counted"
    ) -> str:
        """Publish one message, wait for its confirm and give its id."""
        message_id = message_id or str(uuid4())
        await self.channel.default_exchange.publish(
            aio_pika.Message(
                b"%d" % number,
                message_id=message_id,
                type=event_type,
                content_type="application/json",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                headers={"x-aggregate-type": "counter", **({} if key is None else {"x-aggregate-id": key})},
            ),
            self.name,
            mandatory=True,
        )
        return message_id

    async def send_all(self, numbers: Iterable[int], *, key: str = "a") -> None:
        for number in numbers:
            await self.send(number, key=key)

    async def declare(self) -> None:
        await self.channel.declare_queue(self.name, durable=True, arguments={"x-queue-type": "quorum"})

    async def ready_count(self) -> int:
        """Tell how many messages wait to be delivered; those that are with a consumer do not."""
        declared = await self.channel.declare_queue(self.name, passive=True)
        return declared.declaration_result.message_count or 0

    async def consumer_count(self) -> int:
        declared = await self.channel.declare_queue(self.name, passive=True)
        return declared.declaration_result.consumer_count or 0

    async def drained(self) -> bool:
        """Tell whether the queue is empty and nobody consumes."""
        return not await self.ready_count() and not await self.consumer_count()


@dataclass
class Table:
    """What the handlers did, read by another connection."""

    connection: psycopg.AsyncConnection

    async def numbers(self, key: str | None = None) -> list[int]:
        """Give the numbers in the order in which they were applied."""
        cursor = await self.connection.execute(
            "SELECT number FROM effect WHERE %(key)s::text IS NULL OR key = %(key)s ORDER BY position", {"key": key}
        )
        return [number for (number,) in await cursor.fetchall()]

    async def inbox_count(self) -> int:
        cursor = await self.connection.execute("SELECT count(*) FROM outbox.processed_message")
        row = await cursor.fetchone()
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


QUICK = Backoff(initial=0.02, maximum=0.2)


@asynccontextmanager
async def running(consumer: Consumer) -> AsyncIterator[asyncio.Task[None]]:
    """Run a consumer beside the test, and stop it; an error of its own is the test's."""
    task = asyncio.create_task(consumer.run(signals=False))
    try:
        yield task
    finally:
        consumer.stop()
        await asyncio.wait([task])
    task.result()


def through(broker: BrokerSettings, port: int) -> BrokerSettings:
    """Give the settings that lead to the same virtual host through a proxy."""
    return broker.model_copy(update={"url": SecretStr(str(URL(broker.url.get_secret_value()).with_port(port)))})
