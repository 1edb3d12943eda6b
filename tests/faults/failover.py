"""A relay on a cluster of brokers under load: what a drill breaks, and what must hold when it is whole again."""

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import aio_pika
import psycopg
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import DeliveryError

from tests.faults.load import Load, under_load
from tests.faults.victim import Victim
from tests.support.cluster import Cluster, Node

MAX_IN_FLIGHT = 200
AGAIN_AFTER = 0.02  # seconds

# The longest time without a mark.
PAUSE = """
    SELECT coalesce(extract(epoch FROM max(gap)), 0)::float8
    FROM (
        SELECT sent_at - lag(sent_at) OVER (ORDER BY sent_at) AS gap FROM outbox.message WHERE state = 'sent'
    ) AS marks
"""


@dataclass
class Failover:
    """The scene of a drill."""

    cluster: Cluster
    vhost: str
    leader: Node  # of the queue that everything goes to
    followers: list[Node]
    load: Load
    relay: Victim
    reference: "Reference"

    def events(self, name: str) -> list[Mapping[str, Any]]:
        """Give what the relay has logged under this name."""
        lines = self.relay.log.read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    @property
    def losses(self) -> list[str]:
        """Why the relay lost its connection, each time."""
        return [event["reason"] for event in self.events("broker.degraded") if "connection lost" in event["reason"]]

    async def finish(self) -> None:
        """Heal, catch up, and see that nothing was lost, reordered or blamed, and only what was in flight repeated."""
        await self.cluster.heal()
        await self.load.comes_on(60)  # by itself, with writers going on
        self.load.broker_url = self.followers[0].url(self.vhost)  # the leader may have lost its connections
        await self.load.finish(120)
        faults = len(self.losses) + len(self.events("confirm.timed_out"))
        print(f"losses {self.losses}, repeats {self.load.repeats}, pauses: {await self.pauses()}")
        assert self.load.repeats <= MAX_IN_FLIGHT * faults
        assert self.relay.stop(signal.SIGTERM) == 0

    async def pauses(self) -> str:
        async with await psycopg.AsyncConnection.connect(self.load.url) as connection:
            (ours,) = await (await connection.execute(PAUSE)).fetchone() or (0.0,)
        return f"{ours:.1f} s with the relay, {self.reference.pause:.1f} s without"


class Reference:
    """A client that publishes one message after the other, through a healthy node while there is one: how long the
    broker itself pauses."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = cycle(urls)
        self._confirmed_at = 0.0
        self.pause = 0.0

    async def run(self) -> None:
        while True:
            # CancelledError as well: the library raises it when the connection goes away.
            with suppress(aio_pika.exceptions.AMQPError, OSError, asyncio.CancelledError):
                async with await aio_pika.connect(next(self._urls), timeout=2) as connection:
                    await self._publish(await connection.channel())
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            await asyncio.sleep(AGAIN_AFTER)

    async def _publish(self, channel: AbstractChannel) -> None:
        loop = asyncio.get_running_loop()
        self._confirmed_at = self._confirmed_at or loop.time()
        while True:
            with suppress(DeliveryError):  # no leader for now
                await channel.default_exchange.publish(aio_pika.Message(b""), "reference")
                self.pause = max(self.pause, loop.time() - self._confirmed_at)
                self._confirmed_at = loop.time()
            await asyncio.sleep(AGAIN_AFTER)


@asynccontextmanager
async def failover(
    cluster: Cluster, database_url: str, logs: Path, *, through: str = "leader", **variables: str
) -> AsyncIterator[Failover]:
    """Run writers, a relay and a reference; `through`: whether the relay's first host is the leader or a follower."""
    vhost = f"drill_{secrets.token_hex(4)}"
    leader, *followers = cluster.nodes
    leader.add_vhost(vhost)
    reference = Reference([node.url(vhost) for node in reversed(cluster.nodes)])
    async with under_load(database_url, leader.url(vhost)) as load:
        async with await aio_pika.connect(leader.url(vhost)) as connection:
            await declare_quorum(connection, "reference")
        assert cluster.leader_of(load.queue.name, vhost) is leader
        first = leader if through == "leader" else followers[0]
        environment = {
            **os.environ,
            "RELAY_DATABASE_URL": database_url,
            "RELAY_BROKER_URL": cluster.urls(vhost, first=first),
            "RELAY_RELAY__MAX_IN_FLIGHT": str(MAX_IN_FLIGHT),
            "RELAY_LOG__FORMAT": "json",
            **variables,
        }
        relay = Victim("relay", [Path(sys.executable).parent / "relay", "run"], environment, "relay.ready", logs)
        try:
            await relay.start()
            async with asyncio.TaskGroup() as tasks:
                measuring = tasks.create_task(reference.run(), name="reference")
                scene = Failover(cluster, vhost, leader, followers, load, relay, reference)
                await load.comes_on(60)
                yield scene
                measuring.cancel()
        finally:
            relay.stop(signal.SIGKILL)


async def declare_quorum(connection: AbstractConnection, name: str) -> None:
    channel = await connection.channel()
    await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
