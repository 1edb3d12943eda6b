"""Apply messages once: the inbox row and the handler's work in one transaction.

A message whose inbox row exists was applied and committed before; it is left alone. So it does not matter how
often a message is delivered, nor whether we learn that a commit arrived: after a lost connection we simply try again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import psycopg
from psycopg import errors
from psycopg.rows import tuple_row
from psycopg.sql import Composed

from relay.config.settings import DatabaseSettings
from relay.consume.apply.calls import call, call_async, in_own_task
from relay.consume.apply.connected import Connected, Parameters
from relay.consume.apply.days import days_of, refused_day_named
from relay.consume.apply.handlers import Handlers
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_insert import EVERYTHING, Admission, Applied, applied_of
from relay.consume.message import Delivery
from relay.database import CANCEL_TIMEOUT, connect, connect_async, unplug
from relay.errors import ConfigurationError

Result = TypeVar("Result")
Statement = Composed | bytes
Rows = list[tuple[Any, ...]]

NOTHING: Sequence[Parameters] = ({},)


class Transactions(Protocol):
    """One database connection that applies batches, one transaction each."""

    async def open(self) -> None:
        """Connect anew. Raises DatabaseUnavailableError."""

    async def close(self) -> None: ...

    def unplug(self) -> None:
        """End every wait on the connection at once."""

    @property
    def is_lost(self) -> bool:
        """Tell whether the connection is gone: then an error of `apply` is not the handler's fault."""

    @property
    def is_free(self) -> bool:
        """Whether it is connected, and in no transaction: one that a handler has left open would swallow the next."""

    async def apply(self, batch: Sequence[Delivery]) -> Applied:
        """Apply in order, and commit, what is admitted and was not applied before.

        Raises:
            InboxUnavailableError: the database did not take our own statement.
            ExpiredMessageError, MisdatedMessageError: the inbox has no day for one, and makes none.
            PartitionLostError: another member of the pool has the partition.
            Exception: whatever a handler or the commit raised.
            In every case nothing is applied, or (only when `is_lost`) maybe all.
        """

    async def execute(self, statement: Composed, *parameters: Parameters) -> Rows:
        """Run a statement of ours once with each of these parameters, or once without, in a transaction of its own.

        Gives the rows of the last. Raises psycopg.Error, and TimeoutError: it may have been done.
        """


class AsyncTransactions(Connected[psycopg.AsyncConnection]):
    """For `async def` handlers."""

    def __init__(self, inbox: Inbox, handlers: Handlers, admission: Admission, pipeline: bool) -> None:
        super().__init__(inbox, handlers, admission)
        self._pipeline = pipeline

    async def open(self) -> None:
        await self.close()
        self._connection = await connect_async(self._inbox.database, **self._inbox.connection_options)
        await self._connection.set_autocommit(False)  # else what a handler does after a ROLLBACK of its own would stay

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def apply(self, batch: Sequence[Delivery]) -> Applied:
        try:
            return await self._apply(batch)
        except errors.CheckViolation as error:
            if not self._lacks_day(error):
                raise
        with self._ours(), refused_day_named(batch):
            await self.execute(self._make_days, {"days": days_of(batch)})
        return await self._apply(batch)

    async def execute(self, statement: Composed, *parameters: Parameters) -> Rows:
        async with self._bounded(), self._begin() as (connection, _):
            return await self._rows(connection, statement, parameters)

    async def _apply(self, batch: Sequence[Delivery]) -> Applied:
        # Begin, remember and commit are ours and bounded; how long a handler may take is its own affair.
        async with self._bounded() as deadline, self._begin() as (connection, given):
            with self._ours():
                remembered = await self._rows(connection, self._remember, [self._arrived(batch)])
            deadline.reschedule(None)
            try:
                with self._in_handlers(connection, remembered):
                    async with connection.pipeline() if self._pipeline else nullcontext():
                        await in_own_task(self._handle(batch, remembered, given))
            finally:
                deadline.reschedule(asyncio.get_running_loop().time() + self._inbox.patience)
        return applied_of(remembered)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[asyncio.Timeout]:
        """Close the connection when the block takes too long.

        A COMMIT that waits for a lost standby is ended neither by statement_timeout nor by tcp_user_timeout.
        """
        connection = self._connected()
        try:
            async with asyncio.timeout(self._inbox.patience) as deadline:
                yield deadline
        except TimeoutError:
            if deadline.expired():
                await connection.close()
            raise

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[tuple[psycopg.AsyncConnection, Any]]:
        """Begin a transaction, and commit it at the end of the block; give the connection, and what handlers get."""
        connection = self._connected()
        async with connection.transaction():
            yield connection, connection

    @staticmethod
    async def _rows(
        connection: psycopg.AsyncConnection, statement: Statement, parameters: Sequence[Parameters]
    ) -> Rows:
        async with connection.cursor(binary=True, row_factory=tuple_row) as cursor:
            for values in parameters or NOTHING:
                await cursor.execute(statement, values)
            return await cursor.fetchall() if cursor.description else []

    async def _handle(self, batch: Sequence[Delivery], remembered: Sequence[tuple[Any, ...]], given: Any) -> None:
        for handler, argument in self._calls(batch, remembered):
            await self._call(handler, argument, given)

    def _call(self, handler: Callable[..., Any], argument: Any, given: Any) -> Awaitable[None]:
        return call_async(handler, argument, given)


class ThreadTransactions(Connected[psycopg.Connection]):
    """For plain functions: each transaction runs in a thread."""

    async def open(self) -> None:
        await self.close()
        self._connection = await asyncio.to_thread(connect, self._inbox.database, **self._inbox.connection_options)
        self._connection.autocommit = False  # as above

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def apply(self, batch: Sequence[Delivery]) -> Applied:
        return await self._in_thread(self._apply, batch)

    async def execute(self, statement: Composed, *parameters: Parameters) -> Rows:
        async with asyncio.timeout(self._inbox.patience):
            return await self._in_thread(self._execute, statement, parameters)

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        connection = self._connected()
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be ended: its statement is, and the handler sees that as an error.
            with suppress(psycopg.Error):
                await asyncio.to_thread(connection.cancel_safe, timeout=CANCEL_TIMEOUT)
            await asyncio.wait([work], timeout=CANCEL_TIMEOUT)
            unplug(connection)  # a silent server cancels nothing; any other has ended the transaction by now
            await asyncio.wait([work])
            raise

    def _apply(self, batch: Sequence[Delivery]) -> Applied:
        try:
            return self._apply_once(batch)
        except errors.CheckViolation as error:
            if not self._lacks_day(error):
                raise
        with self._ours(), refused_day_named(batch):
            self._execute(self._make_days, [{"days": days_of(batch)}])
        return self._apply_once(batch)

    def _execute(self, statement: Composed, parameters: Sequence[Parameters]) -> Rows:
        with self._begin() as (connection, _):
            return self._rows(connection, statement, parameters)

    def _apply_once(self, batch: Sequence[Delivery]) -> Applied:
        with self._begin() as (connection, given):
            with self._ours():
                remembered = self._rows(connection, self._remember, [self._arrived(batch)])
            with self._in_handlers(connection, remembered):
                for handler, argument in self._calls(batch, remembered):
                    self._call(handler, argument, given)
        return applied_of(remembered)

    def _call(self, handler: Callable[..., Any], argument: Any, given: Any) -> None:
        call(handler, argument, given)

    @contextmanager
    def _begin(self) -> Iterator[tuple[psycopg.Connection, Any]]:
        """Begin a transaction, and commit it at the end of the block; give the connection, and what handlers get."""
        connection = self._connected()
        with connection.transaction():
            yield connection, connection

    @staticmethod
    def _rows(connection: psycopg.Connection, statement: Statement, parameters: Sequence[Parameters]) -> Rows:
        with connection.cursor(binary=True, row_factory=tuple_row) as cursor:
            for values in parameters or NOTHING:
                cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else []


def open_transactions(
    inbox: Inbox, handlers: Handlers | None = None, *, pipeline: bool = False, admission: Admission = EVERYTHING
) -> Transactions:
    """Give transactions, not yet connected; without handlers to `execute` what is ours alone.

    Raises:
        ConfigurationError: inbox, handlers and pipeline do not fit together.
    """
    if not isinstance(inbox.target, DatabaseSettings):
        from relay.consume.apply.sqlalchemy import open_alchemy  # noqa: PLC0415  # SQLAlchemy: only who uses it pays

        return open_alchemy(inbox, handlers, pipeline=pipeline, admission=admission)
    if handlers is None or handlers.is_async:
        return AsyncTransactions(inbox, handlers or Handlers({}, is_async=True), admission, pipeline)
    if pipeline:
        raise ConfigurationError("pipeline needs `async def` handlers")
    return ThreadTransactions(inbox, handlers, admission)
