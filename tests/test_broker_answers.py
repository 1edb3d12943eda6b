"""A wait for the broker's answer ends as a lost connection does, unless its own task is cancelled."""

import asyncio

import pytest

from relay.servers.rabbitmq.connection import answer_within


async def test_a_cancellation_by_the_library_is_a_lost_connection() -> None:
    lost = asyncio.get_running_loop().create_future()
    lost.cancel()

    with pytest.raises(ConnectionResetError, match="open a channel: the connection was lost"):
        async with answer_within("open a channel", 60):
            await lost


async def test_a_cancellation_of_the_task_stays_one() -> None:
    async def wait() -> None:
        async with answer_within("open a channel", 60):
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
