"""Relays on a cluster of brokers under load: what a drill breaks, and what must hold after it has healed."""

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.faults.load import Load, under_load
from tests.faults.victim import Victim
from tests.support.cluster import Cluster, Node
from tests.support.plain_client import PlainPublisher
from tests.support.queues import keep_queues

MAX_IN_FLIGHT = 200

# The longest time without a mark.
PAUSE = """
    SELECT coalesce(extract(epoch FROM max(gap)), 0)::float8
    FROM (
        SELECT sent_at - lag(sent_at) OVER (ORDER BY sent_at) AS gap FROM outbox.message WHERE state = 'sent'
    ) AS marks
"""


@dataclass
class Failover:
    """The cluster, the load and the relays of one drill."""

    cluster: Cluster
    vhost: str
    leader: Node  # of the queue that everything goes to
    followers: list[Node]
    load: Load
    relays: list[Victim]
    reference: PlainPublisher

    def events(self, name: str) -> list[Mapping[str, Any]]:
        """Return the events of this name that the relays have logged."""
        lines = [line for relay in self.relays for line in relay.log.read_text().splitlines()]
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    @property
    def losses(self) -> list[str]:
        """The reason of each connection that a relay has lost."""
        return [event["reason"] for event in self.events("broker.degraded") if "connection lost" in event["reason"]]

    async def finish(self) -> None:
        """Heal, catch up, and check: nothing lost, reordered or blamed; only what was in flight repeated."""
        await self.cluster.heal()
        await self.load.comes_on(60)  # by itself, with writers going on
        self.load.broker_url = self.followers[0].url(self.vhost)  # the leader may have lost its connections
        await self.load.finish(120)
        faults = len(self.losses) + len(self.events("confirm.timed_out"))
        print(f"losses {self.losses}, repeats {self.load.repeats}, pauses: {await self.pauses()}")
        assert self.load.repeats <= MAX_IN_FLIGHT * faults
        for relay in self.relays:
            assert relay.stop(signal.SIGTERM) == 0

    async def pauses(self) -> str:
        async with await psycopg.AsyncConnection.connect(self.load.url) as connection:
            (ours,) = await (await connection.execute(PAUSE)).fetchone() or (0.0,)
        return f"{ours:.1f} s with the relay, {self.reference.pause:.1f} s without"


@asynccontextmanager
async def failover(
    cluster: Cluster, database_url: str, logs: Path, *, through: str = "leader", relays: int = 1, **variables: str
) -> AsyncIterator[Failover]:
    """Run writers, relays and a reference; `through`: whether the relays' first host is the leader or a follower."""
    vhost = f"drill_{secrets.token_hex(4)}"
    leader, *followers = cluster.nodes
    await cluster.add_vhost(vhost)
    # Of a healthy node, while there is one.
    reference = PlainPublisher([node.url(vhost) for node in reversed(cluster.nodes)])
    async with under_load(database_url, leader.url(vhost)) as load:
        await reference.declare(leader.url(vhost))
        assert cluster.leader_of(load.queue.name, vhost) is leader
        first = leader if through == "leader" else followers[0]
        environment = {
            **os.environ,
            "RELAY_DATABASE_URL": database_url,
            "RELAY_BROKER_URL": cluster.urls(vhost, first=first),
            "RELAY_MAX_IN_FLIGHT": str(MAX_IN_FLIGHT),
            "RELAY_LOG_FORMAT": "json",
            **variables,
        }
        command: list[str | Path] = [Path(sys.executable).parent / "relay", "run"]
        victims = [
            Victim(name, command, {**environment, "RELAY_NODE": name}, "relay.ready", logs)
            for name in (f"relay-{number + 1}" for number in range(relays))
        ]
        try:
            for victim in victims:
                await victim.start()
            async with asyncio.TaskGroup() as tasks:
                measuring = tasks.create_task(reference.run(), name="reference")
                scene = Failover(cluster, vhost, leader, followers, load, victims, reference)
                await load.comes_on(60)
                for node in cluster.nodes:
                    await asyncio.to_thread(keep_queues, node)
                yield scene
                measuring.cancel()
        finally:
            for victim in victims:
                victim.stop(signal.SIGKILL)
