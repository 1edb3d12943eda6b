"""What opens does not outlive the task that was told to end meanwhile, whatever the library makes of it."""

import asyncio
from typing import Any

import pytest

from relay.config.settings import BrokerSettings
from relay.servers.rabbitmq.connection import connect, open_channel
from relay.servers.rabbitmq.insides import Underlay


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


async def test_a_task_that_is_cancelled_as_the_broker_lets_it_in_leaves_no_connection(
    broker: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Underlay] = []
    opens = Underlay.connect

    async def cancelled_as_it_opens(underlay: Underlay, *args: Any) -> None:
        await opens(underlay, *args)
        opened.append(underlay)
        connecting.cancel()
        await asyncio.sleep(0)

    monkeypatch.setattr(Underlay, "connect", cancelled_as_it_opens)
    connecting = asyncio.create_task(connect(broker, "test"))

    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert [each.is_closed for each in opened] == [True]
