"""Every way to write an event, behind one interface, so that one suite can ask the same of all."""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import asyncpg
import django
import psycopg
import sqlalchemy as sa
from django.conf import settings
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from relay.outbox import Event, OutboxMessage, add, add_many

# As many as make add_many copy; readers leave them out.
FILLER = [Event("Filler", None, "Filler", "0") for _ in range(50)]


@dataclass(frozen=True)
class Transaction:
    """A transaction of an application."""

    target: Any  # what `add` takes
    add: Callable[..., Awaitable[None]]
    execute: Callable[[str], Awaitable[object]]  # what else the application does in it
    commit: Callable[[], Awaitable[None]]
    rollback: Callable[[], Awaitable[None]]


Writer = Callable[[str], AbstractAsyncContextManager[Transaction]]
Add = Callable[..., Coroutine[Any, Any, None] | None]


def add_copying(target: Any, *events: Event) -> Coroutine[Any, Any, None] | None:
    return cast(Add, add_many)(target, [*events, *FILLER])


def add_exactly(target: Any, *events: Event) -> Coroutine[Any, Any, None] | None:
    return cast(Add, add_many)(target, events)


@asynccontextmanager
async def psycopg_connection(url: str, add: Add) -> AsyncIterator[Transaction]:
    connection = psycopg.connect(url)
    try:
        yield _in_turn(connection, add, lambda text: connection.execute(text.encode()))
    finally:
        connection.close()


@asynccontextmanager
async def psycopg_async_connection(url: str, add: Add) -> AsyncIterator[Transaction]:
    connection = await psycopg.AsyncConnection.connect(url)
    try:
        yield _in_turn(connection, add, lambda text: connection.execute(text.encode()))
    finally:
        await connection.close()


@asynccontextmanager
async def psycopg_pipeline(url: str, add: Add) -> AsyncIterator[Transaction]:
    connection = psycopg.connect(url)
    try:
        with connection.pipeline():
            yield _in_turn(connection, add, lambda text: connection.execute(text.encode()))
    finally:
        connection.close()


@asynccontextmanager
async def psycopg_async_pipeline(url: str, add: Add) -> AsyncIterator[Transaction]:
    connection = await psycopg.AsyncConnection.connect(url)
    try:
        async with connection.pipeline():
            yield _in_turn(connection, add, lambda text: connection.execute(text.encode()))
    finally:
        await connection.close()


@asynccontextmanager
async def psycopg_cursor(url: str, add: Add) -> AsyncIterator[Transaction]:
    async with psycopg_connection(url, add) as transaction:
        yield _by_cursor(transaction, add)


@asynccontextmanager
async def psycopg_async_cursor(url: str, add: Add) -> AsyncIterator[Transaction]:
    async with psycopg_async_connection(url, add) as transaction:
        yield _by_cursor(transaction, add)


def _by_cursor(transaction: Transaction, add: Add) -> Transaction:
    cursor = transaction.target.cursor()
    return replace(transaction, target=cursor, add=partial(called, add, cursor))


@asynccontextmanager
async def plain_asyncpg(url: str, add: Add) -> AsyncIterator[Transaction]:
    """A connection of asyncpg itself, whose application has set codecs for JSON."""
    connection = await asyncpg.connect(url)
    for name in ("json", "jsonb"):
        await connection.set_type_codec(name, schema="pg_catalog", encoder=json.dumps, decoder=json.loads)

    async def end(statement: str) -> None:
        await connection.execute(statement)
        await connection.execute("BEGIN")

    try:
        await connection.execute("BEGIN")
        yield replace(
            _in_turn(connection, add, connection.execute),
            commit=partial(end, "COMMIT"),
            rollback=partial(end, "ROLLBACK"),
        )
    finally:
        await connection.close()


@asynccontextmanager
async def sqlalchemy_connection(url: str, add: Add) -> AsyncIterator[Transaction]:
    with _engine(url).connect() as connection:
        yield _in_turn(connection, add, connection.exec_driver_sql)


@asynccontextmanager
async def sqlalchemy_session(url: str, add: Add) -> AsyncIterator[Transaction]:
    with Session(_engine(url)) as session:
        yield _in_turn(session, add, lambda text: session.execute(sa.text(text)))


@asynccontextmanager
async def sqlalchemy_scoped_session(url: str, add: Add) -> AsyncIterator[Transaction]:
    session = scoped_session(sessionmaker(_engine(url)))
    try:
        yield _in_turn(session, add, lambda text: session.execute(sa.text(text)))
    finally:
        session.remove()


@asynccontextmanager
async def sqlalchemy_async_connection(url: str, add: Add) -> AsyncIterator[Transaction]:
    async with _async_engine(url).connect() as connection:
        yield _in_turn(connection, add, connection.exec_driver_sql)


@asynccontextmanager
async def asyncpg_connection(url: str, add: Add) -> AsyncIterator[Transaction]:
    async with _async_engine(url, "asyncpg").connect() as connection:
        yield _in_turn(connection, add, connection.exec_driver_sql)


@asynccontextmanager
async def asyncpg_session(url: str, add: Add) -> AsyncIterator[Transaction]:
    async with AsyncSession(_async_engine(url, "asyncpg")) as session:
        yield _in_turn(session, add, lambda text: session.execute(sa.text(text)))


@asynccontextmanager
async def sqlalchemy_async_session(url: str, add: Add) -> AsyncIterator[Transaction]:
    async with AsyncSession(_async_engine(url)) as session:
        yield _in_turn(session, add, lambda text: session.execute(sa.text(text)))


@asynccontextmanager
async def sqlalchemy_async_scoped_session(url: str, add: Add) -> AsyncIterator[Transaction]:
    session = async_scoped_session(async_sessionmaker(_async_engine(url)), scopefunc=lambda: 1)
    try:
        yield _in_turn(session, add, lambda text: session.execute(sa.text(text)))
    finally:
        await session.remove()


@asynccontextmanager
async def django_connection(url: str, add: Add) -> AsyncIterator[Transaction]:
    connection = django_wrapper(url)
    try:
        yield _in_turn(connection, add, lambda text: connection.cursor().execute(text))
    finally:
        connection.close()


@asynccontextmanager
async def django_cursor(url: str, add: Add) -> AsyncIterator[Transaction]:
    connection = django_wrapper(url)
    try:
        with connection.cursor() as cursor:
            by_cursor = _in_turn(cursor, add, cursor.execute)
            yield replace(_in_turn(connection, add, cursor.execute), add=by_cursor.add)
    finally:
        connection.close()


def add_mapped(session: Any, *events: Event) -> None:
    session.add_all([OutboxMessage(event) for event in events])


def add_plain(connection: psycopg.Connection, *events: Event) -> None:
    """Write as an application would that has never heard of this package."""
    for event in events:
        payload = "payload_bytes" if isinstance(event.payload, bytes) else "payload"
        values = {
            "aggregate_type": event.aggregate_type,
            "aggregate_id": event.aggregate_id,
            "event_type": event.event_type,
            payload: event.payload,
            "message_id": event.message_id,
            "headers": event.headers and psycopg.types.json.Jsonb(event.headers),
            "exchange": event.exchange,
            "routing_key": event.routing_key,
            "content_type": event.content_type,
            "available_at": event.available_at,
        }
        given = {column: value for column, value in values.items() if value is not None}
        statement = sql.SQL("INSERT INTO outbox.message ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, given)), sql.SQL(", ").join(sql.Placeholder() * len(given))
        )
        connection.execute(statement, list(given.values()))


TARGETS = [
    psycopg_connection,
    psycopg_async_connection,
    psycopg_cursor,
    psycopg_async_cursor,
    sqlalchemy_connection,
    sqlalchemy_session,
    sqlalchemy_scoped_session,
    sqlalchemy_async_connection,
    sqlalchemy_async_session,
    sqlalchemy_async_scoped_session,
]
WITHOUT_COPY = [psycopg_pipeline, psycopg_async_pipeline, asyncpg_connection, asyncpg_session, plain_asyncpg]
CHECKED: dict[str, Writer] = {
    **{f"{target.__name__}-add": partial(target, add=add) for target in TARGETS},
    **{f"{target.__name__}-copy": partial(target, add=add_copying) for target in TARGETS},
    **{f"{target.__name__}-add": partial(target, add=add) for target in WITHOUT_COPY},
    **{f"{target.__name__}-many": partial(target, add=add_copying) for target in WITHOUT_COPY},
    "django_connection-add": partial(django_connection, add=add),
    "django_cursor-copy": partial(django_cursor, add=add_copying),
    "mapped-session": partial(sqlalchemy_session, add=add_mapped),
    "mapped-async_session": partial(sqlalchemy_async_session, add=add_mapped),
}
MANY: dict[str, Writer] = {
    target.__name__: partial(target, add=add_exactly) for target in (*TARGETS, *WITHOUT_COPY, django_connection)
}
ALL: dict[str, Writer] = {**CHECKED, "plain": partial(psycopg_connection, add=add_plain)}


def _in_turn(target: Any, add: Add, execute: Callable[[str], object]) -> Transaction:
    """Make an interface of a target whose methods may or may not have to be awaited."""
    return Transaction(
        target=target,
        add=lambda *events: called(add, target, *events),
        execute=lambda text: called(execute, text),
        commit=lambda: called(target.commit),
        rollback=lambda: called(target.rollback),
    )


def is_async(target: object) -> bool:
    own = (psycopg.AsyncConnection, psycopg.AsyncCursor, asyncpg.Connection)
    return isinstance(target, (*own, AsyncConnection, AsyncSession, async_scoped_session))


async def called(function: Callable[..., Any], *arguments: object, **options: object) -> Any:
    """Call it, and await what it returns if it must be awaited."""
    result = function(*arguments, **options)
    return await result if hasattr(result, "__await__") else result


def django_wrapper(url: str) -> Any:
    """Make what `django.db.connection` is; in transactions, as in `atomic`."""
    if not settings.configured:
        settings.configure()
        django.setup()
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # these tests have an event loop
    given = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    database = {"ENGINE": "django.db.backends.postgresql", **{key: given.get(name, "") for key, name in names.items()}}
    connection = ConnectionProxy(ConnectionHandler({"default": database}), "default")
    connection.set_autocommit(False)
    return connection


def _engine(url: str) -> sa.Engine:
    return sa.create_engine(_sqlalchemy_url(url), poolclass=sa.pool.NullPool)


def _async_engine(url: str, driver: str = "psycopg") -> Any:
    return create_async_engine(_sqlalchemy_url(url, driver), poolclass=sa.pool.NullPool)


def _sqlalchemy_url(url: str, driver: str = "psycopg") -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")
