"""A channel that opens does not outlive the task that was told to end meanwhile, whatever the library makes of it."""

import asyncio
from typing import Any

import pytest

from relay.config.settings import BrokerSettings
from relay.servers.rabbitmq.connection import connect, open_channel


async def test_a_cancel_that_the_library_swallows_while_a_channel_opens_is_raised(
    broker: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await connect(broker, "test")
    asked = asyncio.Event()
    opens = connection.channel

    async def swallow_a_cancel(**options: Any) -> Any:
        asked.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return await opens(**options)

    monkeypatch.setattr(connection, "channel", swallow_a_cancel)
    opening = asyncio.create_task(open_channel(connection))
    await asked.wait()
    opening.cancel()

    with pytest.raises(asyncio.CancelledError):
        await opening
    await connection.hang_up()
