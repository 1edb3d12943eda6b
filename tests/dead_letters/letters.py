"""A queue of dead letters as a consumer leaves them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from aio_pika.abc import AbstractIncomingMessage
from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.config.settings import BrokerSettings
from relay.consume.classify import Failure, FailureReason
from relay.consume.failed.envelope import dead_letter
from relay.operate.letters.letter import Letter, LetterSelection
from relay.operate.letters.read import list_letters
from tests.consume.effects import CONSUMER, QUEUE, Queue

DEAD = f"{QUEUE}.dead"
QUORUM: Mapping[str, Any] = {"x-queue-type": "quorum", "x-overflow": "reject-publish"}
FAILED_AT = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)
NO_FILTER = LetterSelection()


@dataclass
class Letters:
    """The dead letters of this test."""

    queue: Queue
    channel: AbstractChannel
    broker: BrokerSettings

    async def declare(self, arguments: Mapping[str, Any] = QUORUM) -> None:
        await self.channel.queue_declare(DEAD, durable=True, arguments=dict(arguments))

    async def put(
        self,
        number: int = 1,
        *,
        body: bytes | None = None,
        reason: FailureReason = FailureReason.EXHAUSTED,
        key: str = "a",
        event_type: str = "Counted",
        consumer: str = CONSUMER,
        exception: str = "RuntimeError",
        failed_at: datetime = FAILED_AT,
        message_id: str | None = None,
        properties: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> str:
        """Put in a letter as a consumer does, and give its message id."""
        message_id = message_id or str(uuid4())
        came = Basic.Properties(
            message_id=message_id,
            message_type=event_type,
            content_type="application/json",
            delivery_mode=2,
            headers={"x-aggregate-type": "counter", "x-aggregate-id": key, **(headers or {})},
            **(properties or {}),
        )
        delivered = DeliveredMessage(
            delivery=Basic.Deliver("", 1, redelivered=False, exchange="outbox", routing_key="counter.Counted"),
            header=ContentHeader(properties=came),
            body=b"%d" % number if body is None else body,
            channel=self.channel,
        )
        failure = Failure(
            attempts=5,
            first_failed_at=FAILED_AT,
            failed_at=failed_at,
            exception=exception,
            words="not today",
            reason=reason,
        )
        sent = dead_letter(delivered, failure, consumer)
        await self.channel.basic_publish(delivered.body, routing_key=DEAD, properties=sent, mandatory=True)
        return message_id

    async def put_all(self, count: int, *, size: int = 1) -> list[str]:
        """Put in so many, with bodies of so many bytes."""
        puts = (self.put(body=b"%0*d" % (size, number), message_id=f"id-{number}") for number in range(count))
        return await asyncio.gather(*puts)

    async def read(self, selection: LetterSelection = NO_FILTER) -> list[Letter]:
        letters, _ = await list_letters(self.broker, DEAD, selection)
        return letters

    async def ids(self, selection: LetterSelection = NO_FILTER) -> list[str | None]:
        return [each.message_id for each in await self.read(selection)]

    async def consumed(self) -> list[AbstractIncomingMessage]:
        """Take out what is in the consumed queue."""
        return await self.queue.ready()

    async def taken(self) -> list[AbstractIncomingMessage]:
        """Take all out."""
        return await self.queue.dead()

    async def waiting(self) -> int:
        return await self.queue.dead_count()

    async def has(self, count: int) -> bool:
        return await self.waiting() == count
