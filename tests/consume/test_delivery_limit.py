"""A quorum queue of RabbitMQ 4 gives up a message that has come back 20 times. The README's queue loses nothing."""

import asyncio
from pathlib import Path

import psycopg

from relay.config.loading import load
from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, on
from relay.servers.rabbitmq import topology
from tests.consume.delivery_timeout import WORK
from tests.consume.effects import Queue, Table, count, running
from tests.prose.pages import programs
from tests.support.eventually import eventually
from tests.support.proxied import proxied

LOSSES = 25


async def test_a_message_whose_connection_is_lost_25_times_is_applied_or_a_dead_letter(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, tmp_path: Path
) -> None:
    (tmp_path / "relay.toml").write_text(programs("README.md", "toml")[0])
    listed = load(config=tmp_path / "relay.toml", environ={}).settings.topology
    assert not [each for each in await topology.apply(broker, listed) if each.standing in topology.BAD]
    queue.name = listed.queues[0].name
    may_end = asyncio.Event()

    @on("Counted")
    async def wait(message: Message, connection: psycopg.AsyncConnection) -> None:
        await may_end.wait()
        await count(message, connection)

    async with proxied(broker) as (proxy, far):
        consumer = Consumer(queue.name, [wait], inbox=inbox, broker=far, work=WORK)
        async with running(consumer):
            await queue.send(1)
            for losses in range(LOSSES):

                async def is_in_hand_or_dead(losses: int = losses) -> bool:
                    return consumer.counters.deliveries > losses or (losses > 0 and await queue.dead_count() == 1)

                await eventually(is_in_hand_or_dead, "it is delivered again, or given up", 30)
                proxy.cut()
            may_end.set()

            async def is_settled() -> bool:
                return consumer.counters.applied + await queue.dead_count() == 1

            await eventually(is_settled, "it is applied, or a dead letter")
