"""An asynchronous write that nobody awaits is loud, and one that is awaited in any way is quiet."""

import asyncio
import gc
import inspect
import warnings
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from relay.outbox import Event, NotAwaitedError, add, add_many
from tests.outbox.conftest import MessageTable


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException | None]]:
    """What `sys.unraisablehook` would print to stderr."""
    seen: list[BaseException | None] = []
    monkeypatch.setattr("sys.unraisablehook", lambda end: seen.append(end.exc_value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as many setups do
        yield seen
        gc.collect()


def event() -> Event:
    return Event("customer", "17", "InvoiceIssued", {})


async def test_a_write_that_nobody_awaits_is_an_error_at_once(
    module_url: str, table: MessageTable, unraisable: list[BaseException | None]
) -> None:
    async with await psycopg.AsyncConnection.connect(module_url) as connection:
        add(connection, event())  # type: ignore[unused-coroutine]
        add_many(AsyncSession(), [event()])  # type: ignore[unused-coroutine]
        line = inspect.currentframe().f_lineno  # type: ignore[union-attr]

    assert [(type(each), each.file, each.line) for each in unraisable if isinstance(each, NotAwaitedError)] == [
        (NotAwaitedError, __file__, line - 2),
        (NotAwaitedError, __file__, line - 1),
    ]
    assert "await add(...)" in str(unraisable[0])
    assert table.rows() == []


async def test_a_write_that_is_awaited_by_any_means_is_quiet(
    module_url: str, table: MessageTable, unraisable: list[BaseException | None]
) -> None:
    async with await psycopg.AsyncConnection.connect(module_url) as connection:
        await add(connection, event())
        await asyncio.create_task(add(connection, event()))
        await asyncio.gather(add(connection, event()), add(connection, event()))
        await asyncio.wait_for(add_many(connection, [event() for _ in range(100)]), 60)
        add(connection, event()).close()
        cancelled = asyncio.create_task(add(connection, event()))
        cancelled.cancel()
        await asyncio.wait([cancelled])

    gc.collect()
    assert unraisable == []
    assert len(table.rows()) == 104
