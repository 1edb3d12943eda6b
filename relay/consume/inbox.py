"""Apply messages once: the inbox row and the handler's work in one transaction.

A message whose inbox row exists was applied and committed before; it is left alone. So it does not matter how
often a message is delivered, nor whether we learn that a commit arrived: after a lost connection we simply try again.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, LiteralString, Protocol, TypeVar
from uuid import UUID

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from relay.consume.handlers import Handlers
from relay.consume.message import Delivery, Message
from relay.database import connect, connect_async
from relay.errors import HandlerCancelledError, SchemaError
from relay.settings import DatabaseSettings

Connection = TypeVar("Connection", psycopg.Connection, psycopg.AsyncConnection)

# In the order of message_id: two consumers that got the same messages wait for each other, never in a circle.
REMEMBER = """
    INSERT INTO {schema}.processed_message (consumer_name, message_id, business_key)
    SELECT %(consumer)s, message_id, business_key
    FROM unnest(%(message_ids)s::uuid[], %(business_keys)s::text[]) AS arrived (message_id, business_key)
    ORDER BY message_id
    ON CONFLICT (consumer_name, message_id) DO NOTHING
    RETURNING message_id
"""

PROBE = "SELECT consumer_name, message_id, business_key FROM {schema}.processed_message LIMIT 0"


@dataclass(frozen=True, slots=True)
class Inbox:
    """Where a consumer remembers what it has applied: in the database that its handlers write to.

    `consumer_name` keeps apart several consumers of one message; processes that share a queue share the name.
    """

    database: DatabaseSettings
    consumer_name: str

    def statement(self, text: LiteralString) -> Composed:
        return SQL(text).format(schema=Identifier(self.database.schema_name))

    @property
    def connection_options(self) -> dict[str, Any]:
        return {"application_name": f"outbox-consumer {self.consumer_name}"}

    async def check(self) -> None:
        """See that the inbox is there.

        Raises:
            DatabaseUnavailableError: no host of the URL lets us in.
            SchemaError: the table is missing, or not ours to use.
        """
        connection = await connect_async(self.database, **self.connection_options)
        try:
            await connection.execute(self.statement(PROBE))
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
            raise SchemaError(
                f"table {self.database.schema_name}.processed_message is missing in the consumer's database;"
                " `relay migrate` makes it"
            ) from None
        except psycopg.errors.InsufficientPrivilege:
            raise SchemaError(
                f"the consumer's database user may not use {self.database.schema_name}.processed_message;"
                " it needs SELECT and INSERT"
            ) from None
        finally:
            await connection.close()


class Transactions(Protocol):
    """One database connection that applies batches, one transaction each."""

    async def open(self) -> None:
        """Connect anew. Raises DatabaseUnavailableError."""

    async def close(self) -> None: ...

    @property
    def is_lost(self) -> bool:
        """Tell whether the connection is gone: then an error of `apply` is not the handler's fault."""

    async def apply(self, batch: Sequence[Delivery]) -> int:
        """Apply in order, and commit, what was not applied before; tell how many that were.

        Raises whatever a handler or the database raised; then nothing is applied, or (only when `is_lost`) maybe all.
        """


def open_transactions(inbox: Inbox, handlers: Handlers, *, pipeline: bool) -> Transactions:
    return AsyncTransactions(inbox, handlers, pipeline) if handlers.is_async else ThreadTransactions(inbox, handlers)


class _Connected(Generic[Connection]):
    """A connection that may be gone, and what is done on it, whoever waits for the answers."""

    def __init__(self, inbox: Inbox, handlers: Handlers) -> None:
        self._inbox = inbox
        self._handlers = handlers
        self._remember = inbox.statement(REMEMBER)
        self._connection: Connection | None = None

    @property
    def is_lost(self) -> bool:
        return self._connection is None or self._connection.closed

    def _connected(self) -> Connection:
        if self._connection is None:
            raise psycopg.OperationalError("not connected")
        return self._connection

    def _arrived(self, batch: Sequence[Delivery]) -> dict[str, Any]:
        """Give the parameters of `REMEMBER`."""
        return {
            "consumer": self._inbox.consumer_name,
            "message_ids": [delivery.message.message_id for delivery in batch],
            "business_keys": [delivery.message.aggregate_id for delivery in batch],
        }

    def _calls(
        self, batch: Sequence[Delivery], remembered: Iterable[tuple[UUID]]
    ) -> Iterator[tuple[Callable[..., Any], Message | list[Message]]]:
        """Give the handlers' calls for the messages that were not known, in order, each once."""
        fresh = {message_id for (message_id,) in remembered}
        return self._handlers.calls(_take(batch, fresh))


class AsyncTransactions(_Connected[psycopg.AsyncConnection]):
    """For `async def` handlers."""

    def __init__(self, inbox: Inbox, handlers: Handlers, pipeline: bool) -> None:
        super().__init__(inbox, handlers)
        self._pipeline = pipeline

    async def open(self) -> None:
        await self.close()
        self._connection = await connect_async(self._inbox.database, **self._inbox.connection_options)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def apply(self, batch: Sequence[Delivery]) -> int:
        connection = self._connected()
        now, patience = asyncio.get_running_loop().time, self._inbox.database.command_timeout
        try:
            # Begin, remember and commit are ours and bounded: a COMMIT that waits for a lost standby is ended neither
            # by statement_timeout nor by tcp_user_timeout. How long a handler may take is its own affair.
            async with asyncio.timeout(patience) as deadline, connection.transaction():
                cursor = await connection.execute(self._remember, self._arrived(batch), binary=True)
                remembered = await cursor.fetchall()
                deadline.reschedule(None)
                try:
                    async with connection.pipeline() if self._pipeline else nullcontext():
                        await self._handle(batch, remembered, connection)
                finally:
                    deadline.reschedule(now() + patience)
        except TimeoutError:
            if deadline.expired():
                await connection.close()
            raise
        return len(remembered)

    async def _handle(
        self, batch: Sequence[Delivery], remembered: Iterable[tuple[UUID]], connection: psycopg.AsyncConnection
    ) -> None:
        try:
            for handler, argument in self._calls(batch, remembered):
                await handler(argument, connection)
        except asyncio.CancelledError:
            # Some libraries raise it when their own connection is lost (aio-pika does); nobody cancelled us.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise HandlerCancelledError from None


class ThreadTransactions(_Connected[psycopg.Connection]):
    """For plain functions: each transaction runs in a thread."""

    async def open(self) -> None:
        await self.close()
        self._connection = await asyncio.to_thread(connect, self._inbox.database, **self._inbox.connection_options)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def apply(self, batch: Sequence[Delivery]) -> int:
        connection = self._connected()
        work = asyncio.ensure_future(asyncio.to_thread(self._apply, connection, batch))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be ended: its statement is, and the handler sees that as an error.
            await asyncio.to_thread(connection.cancel_safe)
            await asyncio.wait([work])
            raise

    def _apply(self, connection: psycopg.Connection, batch: Sequence[Delivery]) -> int:
        with connection.transaction():
            remembered = connection.execute(self._remember, self._arrived(batch), binary=True).fetchall()
            for handler, argument in self._calls(batch, remembered):
                handler(argument, connection)
        return len(remembered)


def _take(batch: Sequence[Delivery], fresh: set[UUID]) -> Iterator[Message]:
    """Give the messages to apply, in order, each once: a batch may hold one twice."""
    for delivery in batch:
        if delivery.message.message_id in fresh:
            fresh.remove(delivery.message.message_id)
            yield delivery.message
