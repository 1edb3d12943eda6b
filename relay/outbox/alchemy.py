"""The writers for SQLAlchemy: the same statements, in the session's or connection's own transaction."""

from collections.abc import Sequence
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from relay.outbox import insert
from relay.outbox.row import Row

Sync = sa.Connection | Session | scoped_session[Session]
Async = AsyncConnection | AsyncSession | async_scoped_session[AsyncSession]
SYNC = (sa.Connection, Session, scoped_session)
ASYNC = (AsyncConnection, AsyncSession, async_scoped_session)


def write(target: Sync, rows: Sequence[Row], schema: str, *, by_copy: bool) -> None:
    if by_copy and _is_copied(target, rows, schema):
        return
    for batch in insert.batches(rows):
        target.execute(*_execution(batch, schema))


async def write_async(target: Async, rows: Sequence[Row], schema: str, *, by_copy: bool) -> None:
    given = target() if isinstance(target, async_scoped_session) else target
    await given.run_sync(write, rows, schema, by_copy=by_copy)


def _is_copied(target: Sync, rows: Sequence[Row], schema: str) -> bool:
    """Write by COPY if the driver is psycopg 3, and return whether it is."""
    connection = target if isinstance(target, sa.Connection) else target.connection()
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return False
    if not connection.in_transaction():
        connection.begin()  # as any execute() does; COPY goes past SQLAlchemy, which must know of it to commit it
    if isinstance(driver, psycopg.Connection):
        insert.write(driver, rows, schema, by_copy=True)
    else:
        adapted: Any = connection.connection.dbapi_connection
        adapted.run_async(lambda driver: insert.write_async(driver, rows, schema, by_copy=True))
    return True


def _execution(rows: Sequence[Row], schema: str) -> tuple[sa.TextClause, dict[str, Any]]:
    return sa.text(insert.statement(len(rows), schema, ":{}".format)), insert.parameters(rows)
