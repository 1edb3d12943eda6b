"""The upkeep of an inbox leaves nothing behind, whenever it is cancelled."""

import asyncio

import pytest

from relay.consume import Inbox
from relay.consume.startup import keep_up
from relay.servers.postgres.database import DatabaseConnection


async def test_a_connection_is_closed_though_the_upkeep_is_cancelled_before_it_is_used(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: asyncio.Queue[DatabaseConnection] = asyncio.Queue()

    async def wait(self: DatabaseConnection, _: bool) -> None:
        opened.put_nowait(self)
        await asyncio.Event().wait()

    monkeypatch.setattr(DatabaseConnection, "set_autocommit", wait)
    upkeep = asyncio.create_task(keep_up(inbox))
    connection = await opened.get()

    upkeep.cancel()
    await asyncio.wait([upkeep])

    assert connection.closed
