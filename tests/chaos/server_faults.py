"""Faults that hit every relay: the broker, its exchange and binding, the database, or the table fails."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from signal import SIGINT, SIGKILL, SIGQUIT, SIGTERM, Signals
from typing import LiteralString

import aio_pika
import psycopg

from tests.chaos.fleet import WITNESS, Fleet
from tests.chaos.kinds import FaultKind, Planned
from tests.faults.history import Reach
from tests.faults.topology import Topology

# On the node itself: rabbitmqctl takes half a second, and many times that on a busy machine.
# One that ends by itself meanwhile is no error.
CLOSE_CONNECTIONS = (
    '[(catch rabbit_networking:close_connection(Pid, "by an operator")) || Pid <- rabbit_networking:connections()].'
)
SET_WATERMARK = "vm_memory_monitor:set_vm_memory_high_watermark({})."
ALARM, NO_ALARM = '{absolute, "1MB"}', "0.4"
LOCKED_FOR = 2.0  # seconds
LOCKS: list[LiteralString] = [
    "LOCK TABLE outbox.message_sent IN SHARE MODE",  # nothing is marked
    "LOCK TABLE outbox.message IN ACCESS EXCLUSIVE MODE",  # nothing is read or written either
]
# Who waits for a lock lets nobody pass; writers hold theirs for seconds.
IMPATIENCE = "SET lock_timeout = '1s'"


async def close_connections(fleet: Fleet, planned: Planned) -> None:
    await asyncio.to_thread(fleet.servers.rabbitmq.call, CLOSE_CONNECTIONS)


async def restart_broker(fleet: Fleet, planned: Planned) -> None:
    await _restart_broker(fleet, SIGTERM)


async def crash_broker(fleet: Fleet, planned: Planned) -> None:
    await _restart_broker(fleet, SIGKILL)


async def raise_alarm(fleet: Fleet, planned: Planned) -> None:
    await asyncio.to_thread(fleet.servers.rabbitmq.call, SET_WATERMARK.format(ALARM))
    await asyncio.sleep(planned.seconds)
    await asyncio.to_thread(fleet.servers.rabbitmq.call, SET_WATERMARK.format(NO_ALARM))


async def unbind(fleet: Fleet, planned: Planned) -> None:
    await _take_away(fleet, planned.seconds, Topology.unbind, Topology.bind)


async def delete_exchange(fleet: Fleet, planned: Planned) -> None:
    await _take_away(fleet, planned.seconds, Topology.delete_exchange, Topology.declare_exchange)


async def restart_postgres(fleet: Fleet, planned: Planned) -> None:
    await _restart_postgres(fleet, SIGINT, planned.seconds)


async def crash_postgres(fleet: Fleet, planned: Planned) -> None:
    await _restart_postgres(fleet, SIGQUIT, planned.seconds)


async def lock_table(fleet: Fleet, planned: Planned) -> None:
    lock = planned.chance().choice(LOCKS)
    async with await fleet.connect() as connection:
        await connection.execute(IMPATIENCE)
        with suppress(psycopg.errors.LockNotAvailable):
            async with connection.transaction():
                await connection.execute(lock)
                await asyncio.sleep(planned.seconds)


async def _restart_broker(fleet: Fleet, how: Signals) -> None:
    rabbitmq = fleet.servers.rabbitmq
    await asyncio.to_thread(rabbitmq.stop, how)
    rabbitmq.launch()  # here, as the process ends with the thread that started it
    await asyncio.to_thread(rabbitmq.await_up)


async def _take_away(
    fleet: Fleet,
    seconds: float,
    take_away: Callable[[Topology], Awaitable[None]],
    put_back: Callable[[Topology], Awaitable[None]],
) -> None:
    async with await aio_pika.connect(fleet.servers.broker_url) as connection:
        channel = await connection.channel()
        topology = Topology(channel, await channel.get_queue(WITNESS))
        await take_away(topology)
        await asyncio.sleep(seconds)
        await put_back(topology)


async def _restart_postgres(fleet: Fleet, how: Signals, seconds: float) -> None:
    postgres = fleet.servers.postgres
    await asyncio.to_thread(postgres.stop, how)
    await asyncio.sleep(seconds)
    postgres.start()


BROKER = [
    FaultKind("operator closes all connections", close_connections, Reach.ALL, forgets=True),
    FaultKind("broker is restarted", restart_broker, Reach.ALL, forgets=True),
    FaultKind("broker is killed", crash_broker, Reach.ALL, forgets=True),
    FaultKind("memory alarm", raise_alarm, Reach.ALL, forgets=True, seconds=(2.0, 2.0)),
    FaultKind("binding is removed", unbind, Reach.ALL, forgets=True, seconds=(1.0, 4.0)),
    FaultKind("exchange is removed", delete_exchange, Reach.ALL, forgets=True, seconds=(1.0, 4.0)),
]

DATABASE = [
    FaultKind("PostgreSQL is restarted, fast", restart_postgres, Reach.ALL, forgets=True, seconds=(0.0, 1.0)),
    FaultKind("PostgreSQL is restarted, immediate", crash_postgres, Reach.ALL, forgets=True, seconds=(0.0, 1.0)),
    FaultKind("table is locked", lock_table, Reach.ALL, forgets=False, seconds=(LOCKED_FOR, LOCKED_FOR)),
]
