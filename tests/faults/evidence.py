"""What exists after a drill, read by the checker's own SQL and its own AMQP reader."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import LiteralString
from uuid import UUID

import aiormq
import psycopg
from aiormq.abc import DeliveredMessage

from tests.faults.history import History, digest
from tests.support.depth import depth

# `payload::text` of a json column is byte for byte what was written.
ROWS = """
    SELECT id, message_id, aggregate_type || '/' || aggregate_id, state, attempts, held_behind IS NOT NULL,
        coalesce(available_at > now(), false), extract(epoch FROM sent_at)::float8,
        encode(sha256(coalesce(payload_bytes, convert_to(payload::text, 'UTF8'))), 'hex')
    FROM outbox.message_state
"""

WAITING = "SELECT FROM outbox.message_state WHERE state <> ALL (%s) LIMIT 1"

GIVEN_UP = {"parked", "discarded"}  # where an operator sees it
SETTLED = {"sent", *GIVEN_UP}
AT_ONCE = 20_000  # messages
IN_VAIN = 5.0  # seconds without a message that the queue has counted
QUIET = 1.0  # seconds without a publish: the relay has nothing to do, or thinks so


class NoDataError(Exception):
    """The run has no data for a verdict; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table `message`."""

    id: int
    message_id: UUID
    key: str | None
    state: str
    attempts: int
    follows: bool  # parked behind another
    delayed: bool
    sent_at: float | None
    body: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message as it was read from a queue."""

    queue: str
    outbox_id: int
    message_id: UUID
    key: str | None
    body: str
    redelivered: bool = False


@dataclass(slots=True)
class Evidence:
    """Everything that a verdict is based on.

    Attributes:
        business: the message ids whose row is in the writers' own tables; None if those were not read.
        by_key: the relay was told to send nothing of a key before its predecessor is settled.
        holds: the rows of a key wait behind its parked one.
        patient: there was time enough to deliver everything, so a row that still waits is forgotten.
    """

    history: History
    rows: list[Row] = field(default_factory=list)
    deliveries: list[Delivered] = field(default_factory=list)
    business: frozenset[UUID] | None = None
    by_key: bool = True
    holds: bool = True
    patient: bool = False
    looked_at: float = field(default_factory=time.time)

    @property
    def waiting(self) -> int:
        """The rows that must still be delivered."""
        return sum(row.state not in SETTLED for row in self.rows)


async def read_table(url: str) -> list[Row]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        cursor = await connection.execute(ROWS)
        return [Row(*values) for values in await cursor.fetchall()]


async def is_settled(url: str) -> bool:
    """Whether no row waits."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        return (await connection.execute(WAITING, [list(SETTLED)])).rowcount == 0


async def read_ids(url: str, query: LiteralString) -> frozenset[UUID]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        return frozenset(id_ for (id_,) in await (await connection.execute(query)).fetchall())


async def drain(url: str, queues: Sequence[str], within: float = 60) -> list[Delivered]:
    """Return all messages of the queues, and remove them. The order is that in which the broker accepted them."""
    deliveries: list[Delivered] = []
    connection = await aiormq.connect(url)
    try:
        async with asyncio.timeout(within):
            for queue in queues:
                while messages := await _take_what_is_in(connection, queue):
                    deliveries += [_delivered(queue, message) for message in messages]
    finally:
        await connection.close()
    return deliveries


async def _take_what_is_in(connection: aiormq.abc.AbstractConnection, queue: str) -> list[DeliveredMessage]:
    """Return as many messages as the queue counts, at most AT_ONCE; no message if it is empty.

    A queue whose leader changes may count what it no longer has, or forget a consumer: then fewer are taken. They are
    acknowledged only here, so that the broker gives again what has not come this far.
    """
    taken: list[DeliveredMessage] = []
    came = asyncio.Event()

    async def take(message: DeliveredMessage) -> None:
        taken.append(message)
        came.set()

    channel = await connection.channel()
    await channel.basic_qos(prefetch_count=AT_ONCE)  # a quorum queue gives 2,000 to who asks for no limit

    async def counted() -> int | None:
        return (await channel.queue_declare(queue, passive=True)).message_count

    while (count := await depth(counted)) and not taken:
        consuming = await channel.basic_consume(queue, take)
        with suppress(TimeoutError):
            while len(taken) < min(count, AT_ONCE):
                came.clear()
                async with asyncio.timeout(IN_VAIN):
                    await came.wait()
        await channel.basic_cancel(str(consuming.consumer_tag))
    if taken:
        await channel.basic_ack(taken[-1].delivery_tag or 0, multiple=True)
    await channel.close()
    return taken


def _delivered(queue: str, message: DeliveredMessage) -> Delivered:
    properties = message.header.properties
    headers = properties.headers or {}
    kind, id_ = headers.get("x-aggregate-type"), headers.get("x-aggregate-id")
    return Delivered(
        queue,
        int(str(headers["x-outbox-id"])),
        UUID(properties.message_id),
        None if id_ is None else f"{kind!s}/{id_!s}",
        digest(message.body),
        bool(headers.get("x-outbox-redelivered")),
    )
