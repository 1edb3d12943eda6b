"""What the rows are bound for is taken away under load and put back: all arrive, in order, and none is blamed."""

from collections.abc import Awaitable, Callable

import psycopg
import pytest
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractQueue

from relay.settings import Settings
from tests.faults.load import Load, relaying, under_load
from tests.support.eventually import eventually
from tests.support.rabbitmq import RabbitServer

EXCHANGE = "outbox"


class Topology:
    """The way from the relay to the queue, in pieces that can be taken away and put back."""

    def __init__(self, channel: AbstractChannel, queue: AbstractQueue, rabbitmq: RabbitServer, url: str) -> None:
        self._channel = channel
        self._queue = queue
        self._rabbitmq = rabbitmq
        self._vhost, self._user = url.rpartition("/")[2], url.partition("//")[2].partition(":")[0]

    async def unbind(self) -> None:
        await self._queue.unbind(EXCHANGE, "#")

    async def bind(self) -> None:
        await self._queue.bind(EXCHANGE, "#")

    async def delete_exchange(self) -> None:
        await self._channel.exchange_delete(EXCHANGE)

    async def declare_exchange(self) -> None:
        await self._channel.declare_exchange(EXCHANGE, ExchangeType.TOPIC, durable=True)
        await self.bind()

    async def forbid(self) -> None:
        self._rabbitmq.ctl("set_permissions", "-p", self._vhost, self._user, ".*", "^$", ".*")

    async def allow(self) -> None:
        self._rabbitmq.ctl("set_permissions", "-p", self._vhost, self._user, ".*", ".*", ".*")


@pytest.mark.parametrize(
    ("take_away", "put_back"),
    [
        (Topology.unbind, Topology.bind),
        (Topology.delete_exchange, Topology.declare_exchange),
        (Topology.forbid, Topology.allow),
    ],
    ids=["binding", "exchange", "permission"],
)
async def test_it_is_taken_away_under_load_and_put_back(
    settings: Settings,
    database_url: str,
    broker_url: str,
    channel: AbstractChannel,
    rabbitmq: RabbitServer,
    take_away: Callable[[Topology], Awaitable[None]],
    put_back: Callable[[Topology], Awaitable[None]],
) -> None:
    async with under_load(database_url, broker_url) as load, relaying(settings) as node:
        topology = Topology(channel, await channel.get_queue(load.queue.name), rabbitmq, broker_url)
        for _ in range(2):
            await load.comes_on()
            await take_away(topology)
            await eventually(lambda: are_set_aside(load), "rows wait in quarantine")
            await put_back(topology)
        await load.comes_on(60)
        await load.finish(60)
        assert node.figures().broker_losses == {}


async def are_set_aside(load: Load) -> bool:
    async with await psycopg.AsyncConnection.connect(load.url, autocommit=True) as connection:
        cursor = await connection.execute("SELECT count(*) FROM outbox.message WHERE state = 'quarantined'")
        return await cursor.fetchone() != (0,)
