"""The binding or the exchange disappears under load and comes back: all rows arrive in order, and no row is blamed."""

from collections.abc import Awaitable, Callable

import psycopg
import pytest
from aio_pika.abc import AbstractChannel

from relay.config.settings import Settings
from tests.faults.load import Load, relaying, under_load
from tests.faults.topology import Topology
from tests.support.eventually import eventually


@pytest.mark.parametrize(
    ("take_away", "put_back"),
    [
        (Topology.unbind, Topology.bind),
        (Topology.delete_exchange, Topology.declare_exchange),
    ],
    ids=["binding", "exchange"],
)
async def test_it_is_taken_away_under_load_and_put_back(
    settings: Settings,
    database_url: str,
    broker_url: str,
    channel: AbstractChannel,
    take_away: Callable[[Topology], Awaitable[None]],
    put_back: Callable[[Topology], Awaitable[None]],
) -> None:
    """The binding or the exchange disappears under load; rows wait in quarantine, and arrive in order afterwards."""
    async with under_load(database_url, broker_url) as load, relaying(settings) as node:
        topology = Topology(channel, await channel.get_queue(load.queue.name))
        for _ in range(2):
            await load.comes_on()
            await take_away(topology)
            await eventually(lambda: are_set_aside(load), "rows wait in quarantine")
            await put_back(topology)
        await load.comes_on(60)
        await load.finish(60)
        assert node.snapshot().broker_losses == {}


async def are_set_aside(load: Load) -> bool:
    async with await psycopg.AsyncConnection.connect(load.url, autocommit=True) as connection:
        cursor = await connection.execute("SELECT count(*) FROM outbox.message WHERE state = 'quarantined'")
        return await cursor.fetchone() != (0,)
