"""The writers for SQLAlchemy: the same statements, in the transaction of the session or connection.

SQLAlchemy's asynchronous part needs greenlet. So it is imported only by an application that uses it.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from relay.outbox import insert, watch
from relay.outbox.row import NewRow

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    Async = AsyncConnection | AsyncSession | async_scoped_session[AsyncSession]
    ASYNC = (AsyncConnection, AsyncSession, async_scoped_session)

Sync = sa.Connection | Session | scoped_session[Session]
SYNC = (sa.Connection, Session, scoped_session)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "ASYNC":  # at each look: the application may import that part later
            part = sys.modules.get("sqlalchemy.ext.asyncio")
            names = ("AsyncConnection", "AsyncSession", "async_scoped_session")
            return tuple(getattr(part, each) for each in names if hasattr(part, each))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def write(target: Sync, rows: Sequence[NewRow], schema: str, *, by_copy: bool, autocommit: bool) -> None:
    if not rows:
        return
    connection = target if isinstance(target, sa.Connection) else target.connection()
    if not autocommit:
        require_transaction(connection)
    if by_copy and _is_copied(connection, rows, schema):
        return
    try:
        for batch in insert.batches(rows):
            target.execute(*_execution(batch, schema))
    except sa.exc.DBAPIError as error:
        insert.note_remedy(error, schema)
        raise


async def write_async(target: "Async", rows: Sequence[NewRow], schema: str, *, by_copy: bool, autocommit: bool) -> None:
    await run_sync(target, write, rows, schema, by_copy=by_copy, autocommit=autocommit)


async def run_sync(target: "Async", function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function with the synchronous session or connection beneath the target, and return what it returns."""
    from sqlalchemy.ext.asyncio import async_scoped_session  # noqa: PLC0415  # the target is of that part

    given = target() if isinstance(target, async_scoped_session) else target
    return await given.run_sync(function, *arguments, **options)


def require_transaction(connection: sa.Connection) -> None:
    """Check that the next statement runs in a transaction; raises NoTransactionError.

    With AUTOCOMMIT, SQLAlchemy's transactions do not reach the database: the driver commits each statement. psycopg 3
    and asyncpg also notice a transaction that the application began by a BEGIN.
    """
    adapted: Any = connection.connection.dbapi_connection
    driver: Any = connection.connection.driver_connection
    if isinstance(driver, psycopg.Connection):
        insert.require_transaction(driver)
    elif isinstance(driver, psycopg.AsyncConnection):
        adapted.run_async(insert.require_transaction_async)
    elif adapted.autocommit and not (hasattr(driver, "is_in_transaction") and driver.is_in_transaction()):
        raise watch.no_transaction()


def _is_copied(connection: sa.Connection, rows: Sequence[NewRow], schema: str) -> bool:
    """Write by COPY if the driver is psycopg 3. Return whether it is psycopg 3."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return False
    if not connection.in_transaction():
        connection.begin()  # as any execute() does: SQLAlchemy does not see the COPY, but must commit it
    if isinstance(driver, psycopg.Connection):
        insert.write(driver, rows, schema, by_copy=True, autocommit=True)
    else:
        adapted: Any = connection.connection.dbapi_connection
        adapted.run_async(lambda driver: insert.write_async(driver, rows, schema, by_copy=True, autocommit=True))
    return True


def _execution(rows: Sequence[NewRow], schema: str) -> tuple[sa.TextClause, dict[str, Any]]:
    named = dict(zip(NewRow._fields, insert.parameters(rows), strict=True))
    return _statement(schema, is_one=len(rows) == 1), named


@lru_cache
def _statement(schema: str, *, is_one: bool) -> sa.TextClause:
    return sa.text(insert.statement(schema, ":{}", is_one=is_one))
