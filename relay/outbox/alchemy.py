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
    if not rows:
        return
    if not by_copy:
        target.execute(*_execution(rows, schema))
        return
    connection = target if isinstance(target, sa.Connection) else target.connection()
    if not connection.in_transaction():
        connection.begin()  # as any execute() does; COPY goes past SQLAlchemy, which must know of it to commit it
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise _not_psycopg(driver)
    insert.write(driver, rows, schema, by_copy=True)


async def write_async(target: Async, rows: Sequence[Row], schema: str, *, by_copy: bool) -> None:
    if not rows:
        return
    if not by_copy:
        await target.execute(*_execution(rows, schema))
        return
    connection = target if isinstance(target, AsyncConnection) else await target.connection()
    if not connection.in_transaction():
        await connection.begin()
    driver = (await connection.get_raw_connection()).driver_connection
    if not isinstance(driver, psycopg.AsyncConnection):
        raise _not_psycopg(driver)
    await insert.write_async(driver, rows, schema, by_copy=True)


def _execution(rows: Sequence[Row], schema: str) -> tuple[sa.TextClause, dict[str, Any]]:
    return sa.text(insert.statement(len(rows), schema, ":{}".format)), insert.parameters(rows)


def _not_psycopg(driver: object) -> TypeError:
    return TypeError(
        f"add_many writes by psycopg 3's COPY; this connection is a {type(driver).__module__} one: use add"
    )
