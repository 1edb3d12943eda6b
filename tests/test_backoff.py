"""Work that a stop interrupts says so, and never by a value that the work itself could give."""

import asyncio

import pytest

from relay.runtime.backoff import Stopping, unless_stopping


async def test_work_that_ends_before_a_stop_gives_its_result() -> None:
    async def nothing() -> str | None:
        return None

    assert await unless_stopping(asyncio.Event(), nothing()) is None


async def test_a_stop_cancels_the_work_and_raises() -> None:
    stopping, cancelled = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        stopping.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(Stopping):
        await unless_stopping(stopping, hang())

    assert cancelled.is_set()


async def test_work_that_fails_raises_its_error() -> None:
    async def fail() -> None:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        await unless_stopping(asyncio.Event(), fail())


async def test_a_result_that_comes_in_the_tick_of_a_cancel_is_not_lost() -> None:
    kept: list[str] = []

    async def connect() -> str:
        caller.cancel()
        return "a connection"

    async def use() -> None:
        kept.append(await unless_stopping(asyncio.Event(), connect()))
        await asyncio.sleep(0)

    caller = asyncio.create_task(use())

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert kept == ["a connection"]
