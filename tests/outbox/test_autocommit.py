"""Outside of a transaction nothing is written, unless the application says that it is meant."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from relay.outbox import Event, NoTransactionError, OutboxMessage, add, add_many
from relay.outbox.watch import being_strict
from tests.outbox.conftest import MessageTable
from tests.outbox.writers import called, django_wrapper


@dataclass(frozen=True)
class Target:
    """A connection or session of an application in autocommit mode, outside of a transaction."""

    given: Any
    execute: Callable[[str], Any]


Open = Callable[[str], AbstractAsyncContextManager[Target]]


@asynccontextmanager
async def psycopg_connection(url: str) -> AsyncIterator[Target]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield Target(connection, lambda text: connection.execute(text.encode()))


@asynccontextmanager
async def psycopg_async_connection(url: str) -> AsyncIterator[Target]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        yield Target(connection, lambda text: connection.execute(text.encode()))


@asynccontextmanager
async def psycopg_pipeline(url: str) -> AsyncIterator[Target]:
    with psycopg.connect(url, autocommit=True) as connection, connection.pipeline():
        yield Target(connection, lambda text: connection.execute(text.encode()))


@asynccontextmanager
async def psycopg_async_pipeline(url: str) -> AsyncIterator[Target]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection, connection.pipeline():
        yield Target(connection, lambda text: connection.execute(text.encode()))


@asynccontextmanager
async def psycopg_cursor(url: str) -> AsyncIterator[Target]:
    with psycopg.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        yield Target(cursor, lambda text: cursor.execute(text.encode()))


@asynccontextmanager
async def plain_asyncpg(url: str) -> AsyncIterator[Target]:
    """A connection of asyncpg's pool: in autocommit mode, as all of asyncpg are."""
    async with asyncpg.create_pool(url, min_size=1) as pool, pool.acquire() as connection:
        yield Target(connection, connection.execute)


@asynccontextmanager
async def sqlalchemy_connection(url: str) -> AsyncIterator[Target]:
    with engine(url).connect() as connection:
        yield Target(connection, connection.exec_driver_sql)


@asynccontextmanager
async def sqlalchemy_session(url: str) -> AsyncIterator[Target]:
    with Session(engine(url)) as session:
        yield Target(session, lambda text: session.execute(sa.text(text)))


@asynccontextmanager
async def sqlalchemy_async_connection(url: str) -> AsyncIterator[Target]:
    async with async_engine(url, "psycopg").connect() as connection:
        yield Target(connection, connection.exec_driver_sql)


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[Target]:
    async with async_engine(url, "asyncpg").connect() as connection:
        yield Target(connection, connection.exec_driver_sql)


@asynccontextmanager
async def asyncpg_session(url: str) -> AsyncIterator[Target]:
    async with AsyncSession(async_engine(url, "asyncpg")) as session:
        yield Target(session, lambda text: session.execute(sa.text(text)))


@asynccontextmanager
async def django_connection(url: str) -> AsyncIterator[Target]:
    connection = django_wrapper(url)
    connection.set_autocommit(True)
    try:
        yield Target(connection, lambda text: connection.cursor().execute(text))
    finally:
        connection.close()


def engine(url: str) -> sa.Engine:
    url = url.replace("postgresql://", "postgresql+psycopg://")
    return sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)


def async_engine(url: str, driver: str) -> Any:
    url = url.replace("postgresql://", f"postgresql+{driver}://")
    return create_async_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)


OPENED: list[Open] = [
    psycopg_connection,
    psycopg_async_connection,
    psycopg_pipeline,
    psycopg_async_pipeline,
    psycopg_cursor,
    plain_asyncpg,
    sqlalchemy_connection,
    sqlalchemy_session,
    sqlalchemy_async_connection,
    asyncpg_connection,
    asyncpg_session,
    django_connection,
]


def events(count: int = 1) -> list[Event]:
    return [Event("customer", "17", "InvoiceIssued", {"n": number}) for number in range(count)]


@pytest.fixture(params=OPENED, ids=lambda opened: opened.__name__)
def opened(request: pytest.FixtureRequest) -> Open:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_used", [False, True])
async def test_outside_of_a_transaction_nothing_is_written(
    opened: Open, module_url: str, table: MessageTable, is_used: bool
) -> None:
    async with opened(module_url) as target:
        if is_used:
            await called(target.execute, "SELECT 1")
        with pytest.raises(NoTransactionError, match="autocommit=True"):
            await called(add, target.given, *events())
        with pytest.raises(NoTransactionError):
            await called(add_many, target.given, events(60))

    assert table.rows() == []


@pytest.mark.parametrize("write", [add, add_many])
async def test_where_a_test_allows_no_autocommit_the_error_does_not_name_it_as_a_remedy(
    opened: Open, module_url: str, write: Any
) -> None:
    async with opened(module_url) as target:
        with being_strict(), pytest.raises(NoTransactionError) as raised:
            await called(write, target.given, [*events()], autocommit=True)

    assert str(raised.value).endswith("This test's require_transaction() allows no autocommit")


async def test_what_is_meant_is_committed_at_once(opened: Open, module_url: str, table: MessageTable) -> None:
    async with opened(module_url) as target:
        await called(add, target.given, *events(2), autocommit=True)
        await called(add_many, target.given, events(60), autocommit=True)
        await called(target.execute, "SELECT 1")

    assert len(table.rows()) == 62


async def test_a_transaction_begun_by_a_statement_is_one(opened: Open, module_url: str, table: MessageTable) -> None:
    async with opened(module_url) as target:
        await called(target.execute, "BEGIN")
        await called(add, target.given, *events())
        await called(add_many, target.given, events(60))
        await called(target.execute, "ROLLBACK")

    assert table.rows() == []


async def test_a_mapped_row_is_not_flushed_outside_of_a_transaction(module_url: str, table: MessageTable) -> None:
    with Session(engine(module_url)) as session:
        session.add(OutboxMessage(*events()))
        with pytest.raises(NoTransactionError):
            session.flush()
    async with AsyncSession(async_engine(module_url, "asyncpg")) as async_session:
        async_session.add(OutboxMessage(*events()))
        with pytest.raises(NoTransactionError):
            await async_session.commit()
    assert table.rows() == []

    with Session(engine(module_url)) as session:
        session.add(OutboxMessage(*events(), autocommit=True))
        session.flush()
        assert len(table.rows()) == 1


async def test_no_round_trip_asks_for_the_state(module_url: str, table: MessageTable) -> None:
    last = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(module_url, autocommit=True) as connection:
        connection.execute("SELECT 'the last'")
        with pytest.raises(NoTransactionError):
            add(connection, *events())

        assert [row["query"] for row in table.execute(last)] == ["SELECT 'the last'"]
