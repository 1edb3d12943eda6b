"""A test waits for what another thread, process or task writes, and is told what is there when nothing comes."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from relay.outbox import Event, add, event
from relay.testing import AsyncOutbox, Outbox

PATIENT = 60.0  # seconds: a busy machine may take its time
SNAPSHOT = "is repeatable read or serializable, and sees no later commit. Let it be read committed"


@event("InvoiceIssued", version=2, key=("invoice", "number"))
@dataclass
class Issued:
    number: int
    amount: float


def write(database_url: str, *events: Event | Issued) -> None:
    with psycopg.connect(database_url) as connection:
        add(connection, *events)


def written_meanwhile(wait: Callable[[], Any], database_url: str, *events: Event | Issued) -> Any:
    """Commit the events one by one while another thread waits."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        for each in events:
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            write(database_url, each)
        return waiting.result()


def test_an_event_of_another_thread_is_waited_for(connection: psycopg.Connection, database_url: str) -> None:
    outbox = Outbox(connection)
    wanted, other, unlike = Issued(42, 12.5), Issued(43, 12.5), Issued(42, 9)

    def wait() -> Any:
        return outbox.until_written(Issued, key=("invoice", "42"), payload={"amount": 12.5}, within=PATIENT)

    assert written_meanwhile(wait, database_url, other, unlike, wanted) == wanted
    assert outbox.until_written("InvoiceIssued", key=42, within=0) == unlike


def test_a_number_of_events_is_waited_for(connection: psycopg.Connection, database_url: str) -> None:
    outbox = Outbox(connection)

    def wait() -> Any:
        return outbox.until_written("InvoiceIssued", count=2, within=PATIENT)

    assert written_meanwhile(wait, database_url, Issued(1, 1), Issued(2, 2)) == Issued(1, 1)
    with pytest.raises(ValueError, match="assert_nothing_written"):
        outbox.until_written("InvoiceIssued", count=0)


def test_at_the_end_it_fails_as_an_assertion_does(connection: psycopg.Connection) -> None:
    outbox = Outbox(connection)
    add(connection, Issued(42, 12.5))
    wants: list[dict[str, Any]] = [{"key": 43}, {"payload": {"amount": 13}}, {"count": 2}]

    for wanted in wants:
        with pytest.raises(AssertionError) as at_once:
            outbox.assert_written(Issued, **wanted)
        with pytest.raises(AssertionError) as late:
            outbox.until_written(Issued, within=0.1, **wanted)
        assert str(late.value) == str(at_once.value)


async def _psycopg(url: str, wait: Callable[[Any], Awaitable[Any]]) -> Any:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        return await wait(connection)


async def _sqlalchemy(url: str, wait: Callable[[Any], Awaitable[Any]]) -> Any:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    try:
        async with AsyncSession(engine) as session:
            return await wait(session)
    finally:
        await engine.dispose()


async def _asyncpg(url: str, wait: Callable[[Any], Awaitable[Any]]) -> Any:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            return await wait(connection)
    finally:
        await connection.close()


@pytest.mark.parametrize("library", [_psycopg, _sqlalchemy, _asyncpg])
async def test_an_event_of_another_task_is_waited_for(library: Any, database_url: str) -> None:
    async def wait(target: Any) -> Any:
        outbox = AsyncOutbox(target)
        await outbox.assert_nothing_written()
        async with asyncio.TaskGroup() as tasks:
            found = tasks.create_task(outbox.until_written(Issued, key=42, within=PATIENT))
            await asyncio.sleep(0.1)
            async with await psycopg.AsyncConnection.connect(database_url) as connection:
                await add(connection, Issued(42, 12.5))
        with pytest.raises(AssertionError, match=r"no InvoicePaid was written\. The outbox has"):
            await outbox.until_written("InvoicePaid", within=0.1)
        return found.result()

    assert await library(database_url, wait) == Issued(42, 12.5)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_transaction_that_sees_no_later_commit_is_refused(level: str, database_url: str) -> None:
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"), isolation_level=level)
    write(database_url, Issued(42, 12.5))

    with Session(engine) as session, pytest.raises(RuntimeError, match=SNAPSHOT):
        Outbox(session).until_written(Issued)
    engine.dispose()
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        with pytest.raises(RuntimeError, match=SNAPSHOT):
            await AsyncOutbox(connection).until_written(Issued)


def test_without_a_transaction_each_look_sees_what_is_committed(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET default_transaction_isolation = 'repeatable read'")
        outbox = Outbox(connection)

        def wait() -> Any:
            return outbox.until_written(Issued, within=PATIENT)

        assert written_meanwhile(wait, database_url, Issued(42, 12.5)) == Issued(42, 12.5)
