"""A pool from end to end in processes: rows in the outbox, relays that are candidates for the master, and members."""

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import aio_pika
from psycopg import AsyncConnection

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume.failed.queues import partition_queue_names, pool_topology, prepare
from relay.consume.pool.tables import Pool, read_master, read_pools
from relay.servers.postgres.database import connect_async
from relay.testing.servers.process import Process
from tests.consume.effects import CONSUMER, QUEUE
from tests.consume.pool.member import APPLIED
from tests.support.eventually import eventually

RELAY = [str(Path(sys.executable).with_name("relay")), "run"]
MEMBER = [sys.executable, "-m", "tests.consume.pool.member"]
KEYS = 40

WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'counter', 'key-' || number %% %(keys)s, 'Counted', to_json(number)
    FROM generate_series(%(first)s::integer, %(last)s::integer) AS number
"""


class PoolProcesses:
    """The nodes and members of one drill, and the rows that it writes."""

    def __init__(self, database: DatabaseSettings, broker: BrokerSettings, logs: Path) -> None:
        self.database = database
        self.broker = broker
        self.nodes: dict[str, Process] = {}
        self.members: dict[str, Process] = {}
        self.written = 0
        self._logs = logs
        self._environment = {
            **os.environ,
            "RELAY_DATABASE_URL": database.url.get_secret_value(),
            "RELAY_BROKER_URL": broker.url.get_secret_value(),
            "RELAY_HTTP_LISTEN": "",
        }

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[AsyncConnection]:
        async with await connect_async(self.database) as connection:
            yield connection

    def start_node(self, name: str) -> None:
        environment = {**self._environment, "RELAY_NODE": name}
        self.nodes[name] = Process(RELAY, log=self._log(name), environment=environment)

    def start_member(self, name: str) -> None:
        environment = {**self._environment, "TEST_MEMBER": name}
        self.members[name] = Process(MEMBER, log=self._log(name), environment=environment)

    def kill(self, name: str) -> None:
        """Kill a node or a member with SIGKILL."""
        process = self.nodes.pop(name, None) or self.members.pop(name)
        process.stop(signal.SIGKILL)

    async def write(self, count: int) -> None:
        """Commit `count` rows, over all keys in turn."""
        async with self.connected() as connection:
            values = {"keys": KEYS, "first": self.written, "last": self.written + count - 1}
            await connection.execute(WRITE, values)
        self.written += count

    async def write_on(self, rate: int, stop: asyncio.Event) -> None:
        """Commit `rate` rows a second, a tenth of them every 0.1 s, until `stop` is set."""
        while not stop.is_set():
            await self.write(rate // 10)
            await asyncio.sleep(0.1)

    async def pool(self) -> Pool | None:
        """Return the pool; None before its first member has joined."""
        async with self.connected() as connection:
            return next(iter(await read_pools(connection, "outbox")), None)

    async def master(self) -> str | None:
        async with self.connected() as connection:
            return await read_master(connection, "outbox")

    async def there_is_a_master(self, among: Collection[str]) -> str:
        async def is_one() -> bool:
            return await self.master() in among

        await eventually(is_one, f"one of {sorted(among)} is the master")
        return str(await self.master())

    async def shared(self, *members: str) -> None:
        """Wait until these members alone hold all partitions, evenly."""

        async def is_so() -> bool:
            pool = await self.pool()
            if pool is None:
                return False
            partitions = [each.assigned for each in pool.partitions]
            counts = [sum(each.member == name for each in partitions) for name in members]
            return sum(counts) == len(partitions) and max(counts) - min(counts) <= 1

        await eventually(is_so, f"{members} share the partitions")

    async def applied_count(self) -> int:
        async with self.connected() as connection:
            row = await (await connection.execute("SELECT count(DISTINCT message_id) FROM applied")).fetchone()
            return int(row[0]) if row else 0

    async def come_on(self, count: int = 50) -> None:
        """Wait until `count` more messages are applied."""
        goal = await self.applied_count() + count

        async def is_so() -> bool:
            return await self.applied_count() >= goal

        await eventually(is_so, "messages are applied")

    async def judge(self) -> None:
        """Wait until all committed rows are applied, and check: once, in order, by one holder an epoch."""

        async def is_done() -> bool:
            return await self.applied_count() >= self.written

        await eventually(is_done, f"all {self.written} messages are applied")
        async with self.connected() as connection:
            cursor = await connection.execute(
                "SELECT key, number, partition, epoch, member FROM applied ORDER BY position"
            )
            rows = await cursor.fetchall()
        numbers, epochs, holders = defaultdict(list), defaultdict(list), defaultdict(set)
        for key, number, partition, epoch, member in rows:
            numbers[key].append(number)
            epochs[partition].append(epoch)
            holders[partition, epoch].add(member)
        for key in range(KEYS):
            of_key = list(range(key, self.written, KEYS))
            assert numbers[f"key-{key}"] == of_key, f"key-{key} is lost, doubled or out of order"
        assert all(seen == sorted(seen) for seen in epochs.values()), "an earlier holder worked beside a later one"
        assert all(len(members) == 1 for members in holders.values()), "two members had one epoch"

    def log_of(self, name: str) -> str:
        return self._log(name).read_text()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


@asynccontextmanager
async def pool_processes(
    database: DatabaseSettings, broker: BrokerSettings, logs: Path, *, nodes: Collection[str], members: Collection[str]
) -> AsyncIterator[PoolProcesses]:
    """Yield nodes and members that share the partitions; all of them end with the block."""
    await prepare(broker, CONSUMER, pool_topology(QUEUE), may_declare=True)
    async with await aio_pika.connect(broker.url.get_secret_value()) as connection:
        channel = await connection.channel()
        source = await channel.declare_exchange("outbox", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await channel.get_exchange(f"{QUEUE}.partitions")).bind(source, "counter.#")
    processes = PoolProcesses(database, broker, logs)
    async with processes.connected() as database_connection:
        await database_connection.execute(APPLIED)
    try:
        for name in nodes:
            processes.start_node(name)
        await processes.there_is_a_master(nodes)
        for name in members:
            processes.start_member(name)
        if members:
            await processes.shared(*members)
        yield processes
    finally:
        for process in (*processes.members.values(), *processes.nodes.values()):
            process.stop(signal.SIGKILL)


async def waiting(broker: BrokerSettings) -> int:
    """Return how many messages wait in the queues of the partitions."""
    async with await aio_pika.connect(broker.url.get_secret_value()) as connection:
        channel = await connection.channel()
        declared = [await channel.declare_queue(name, passive=True) for name in partition_queue_names(QUEUE)]
        return sum(each.declaration_result.message_count or 0 for each in declared)
