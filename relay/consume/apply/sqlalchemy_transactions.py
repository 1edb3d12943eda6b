"""Transactions for handlers that get a connection or session of SQLAlchemy, with the inbox row in the same transaction.

The transaction is psycopg's, below SQLAlchemy. In it the driver refuses every commit() and rollback(), so nothing can
separate the inbox row from the handler's work. The transactions that SQLAlchemy begins and ends around it reach no
server.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker

from relay.consume.apply.handlers import Handlers, call, call_async
from relay.consume.apply.inbox import Admission, Inbox
from relay.consume.apply.sqlalchemy_engine import engine_of, may_lose_statements, note_lending, refuse_inherited
from relay.consume.apply.transactions import AsyncTransactions, ThreadTransactions
from relay.errors import ConfigurationError, DatabaseUnavailableError
from relay.runtime.threads import call_in_daemon
from relay.servers.postgres.database import closing_at_cancel, is_refusal, one_line, public_reason
from relay.servers.postgres.pooler import BACKEND, lends, lends_async

# A session's commit() releases a savepoint. Its rollback(), also the one after a failed flush, rolls back to it.
IN_SAVEPOINT = "create_savepoint"

# A pool may return a connection that was lost long ago. After its error, SQLAlchemy drops all connections that are as
# old.
LOOK = BACKEND


def open_alchemy(
    inbox: Inbox, handlers: Handlers | None, *, pipeline: bool, admission: Admission
) -> "AlchemyAsync | AlchemyThread":
    """Return transactions, not yet connected.

    Raises:
        ConfigurationError: the handlers are of the other kind, or they ask for a pipeline.
    """
    engine = engine_of(inbox.target)
    is_async = isinstance(engine, AsyncEngine)
    if handlers is not None and handlers.is_async is not is_async:
        wanted = "`async def` handlers" if is_async else "plain functions as handlers"
        raise ConfigurationError(f"an inbox with {type(inbox.target).__name__} takes {wanted}")
    if pipeline:
        raise ConfigurationError("pipeline is psycopg's, and not for handlers that work with SQLAlchemy")
    if handlers is not None:
        handlers.require_place(_place_of(inbox.target, engine))
    handlers = handlers or Handlers({}, is_async)
    if isinstance(engine, AsyncEngine):
        return AlchemyAsync(inbox, handlers, admission, engine)
    return AlchemyThread(inbox, handlers, admission, engine)


def _place_of(target: object, engine: Engine | AsyncEngine) -> type:
    """Return the class of what handlers get."""
    if isinstance(target, sessionmaker | async_sessionmaker):
        made: type = target.class_
        given = made.__bases__[0]
        return given if given.__name__ == made.__name__ else made  # a sessionmaker may make a subclass of the given one
    return AsyncConnection if isinstance(engine, AsyncEngine) else Connection


class AlchemyAsync(AsyncTransactions):
    """For `async def` handlers that get an AsyncConnection or AsyncSession."""

    def __init__(self, inbox: Inbox, handlers: Handlers, admission: Admission, engine: AsyncEngine) -> None:
        super().__init__(inbox, handlers, admission, pipeline=False)
        self._engine = engine
        self._sessions = inbox.target if isinstance(inbox.target, async_sessionmaker) else None
        self._outer: AsyncConnection | None = None

    async def open(self) -> None:
        refuse_inherited(self._engine.pool)
        await self.close()
        try:
            async with asyncio.timeout(self._inbox.statement_timeout):
                with closing_at_cancel():
                    self._outer = await self._engine.connect()
                process = (await self._outer.exec_driver_sql(LOOK)).scalar_one()
                await self._outer.rollback()
                self._connection = await _driver_connection(self._outer)
                if may_lose_statements(self._engine.sync_engine, self._connection, process):
                    async with self._engine.connect() as other:
                        when = await lends_async(self._connection, await _driver_connection(other))
                    note_lending(self._engine.sync_engine, when)
        except (SQLAlchemyError, psycopg.Error, TimeoutError) as error:
            raise _unavailable(error) from error

    async def close(self) -> None:
        outer, self._outer, self._connection = self._outer, None, None
        if outer is not None and not outer.closed:
            await outer.invalidate()  # no other user of the pool gets the settings that handlers made in the session
            await outer.close()

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[tuple[psycopg.AsyncConnection, Any]]:
        connection = self._connected()
        assert self._outer is not None, "it is connected"  # noqa: S101
        await self._outer.begin()
        try:
            async with connection.transaction():
                yield connection, self._outer
        except BaseException:
            if connection.info.transaction_status is TransactionStatus.IDLE:
                await self._outer.rollback()
            else:
                await connection.close()
            raise
        await self._outer.commit()

    async def _call(self, handler: Callable[..., Any], argument: Any, given: AsyncConnection) -> None:
        if self._sessions is None:
            await call_async(handler, argument, given)
            return
        async with self._sessions(bind=given, join_transaction_mode=IN_SAVEPOINT) as session:
            await call_async(handler, argument, session)
            await session.commit()


class AlchemyThread(ThreadTransactions):
    """For plain functions that get a Connection or Session."""

    def __init__(self, inbox: Inbox, handlers: Handlers, admission: Admission, engine: Engine) -> None:
        super().__init__(inbox, handlers, admission)
        self._engine = engine
        self._sessions = inbox.target if isinstance(inbox.target, sessionmaker) else None
        self._outer: Connection | None = None

    async def open(self) -> None:
        refuse_inherited(self._engine.pool)
        await self.close()
        self._outer = await call_in_daemon(self._open, name="connect", discard=_drop)
        self._connection = _blocking_connection(self._outer)

    def _open(self) -> Connection:
        try:
            outer = self._engine.connect()
            try:
                process = outer.exec_driver_sql(LOOK).scalar_one()
                outer.rollback()
                if may_lose_statements(self._engine, _blocking_connection(outer), process):
                    with self._engine.connect() as other:
                        when = lends(_blocking_connection(outer), _blocking_connection(other))
                    note_lending(self._engine, when)
            except BaseException:
                _drop(outer)
                raise
        except (SQLAlchemyError, psycopg.Error) as error:
            raise _unavailable(error) from error
        return outer

    async def close(self) -> None:
        outer, self._outer, self._connection = self._outer, None, None
        if outer is not None and not outer.closed:
            await call_in_daemon(partial(_drop, outer), name="close")

    @contextmanager
    def _begin(self) -> Iterator[tuple[psycopg.Connection, Any]]:
        connection = self._connected()
        assert self._outer is not None, "it is connected"  # noqa: S101
        self._outer.begin()
        try:
            with connection.transaction():
                yield connection, self._outer
        except BaseException:
            if connection.info.transaction_status is TransactionStatus.IDLE:
                self._outer.rollback()
            else:
                connection.close()
            raise
        self._outer.commit()

    def _call(self, handler: Callable[..., Any], argument: Any, given: Connection) -> None:
        if self._sessions is None:
            call(handler, argument, given)
            return
        with self._sessions(bind=given, join_transaction_mode=IN_SAVEPOINT) as session:
            call(handler, argument, session)
            session.commit()


def _drop(outer: Connection) -> None:
    """Close a connection that the pool does not get back, as for `AlchemyAsync.close`."""
    outer.invalidate()
    outer.close()


def _blocking_connection(connection: Connection) -> psycopg.Connection:
    return cast("psycopg.Connection", connection.connection.driver_connection)


async def _driver_connection(connection: AsyncConnection) -> psycopg.AsyncConnection:
    return cast("psycopg.AsyncConnection", (await connection.get_raw_connection()).driver_connection)


def _unavailable(error: Exception) -> DatabaseUnavailableError:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig else error
    is_refused = isinstance(cause, psycopg.Error) and is_refusal(cause)
    words = one_line(cause) or "no answer"
    return DatabaseUnavailableError(words, is_refusal=is_refused, public=public_reason(cause))
