"""Observes relays from outside while a drill runs: readiness, memory, age of transactions, and holders of lanes.

If the database is unreachable, the watch connects again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import LiteralString

import psycopg

from relay.testing.servers.process import resident_bytes
from tests.faults.history import History, Measured, Owned, Probed

INTERVAL = 0.2  # seconds
LOOK_INTERVAL = 0.05  # seconds between two looks at the locks of the lanes
ANSWER_WITHIN = 3.0  # seconds; who has not answered by then is not ready

OLDEST: LiteralString = """
    SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
    FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'outbox-relay'
"""

# Which relay a session belongs to, its heartbeat tells; who holds a lock, the server.
OWNERS: LiteralString = """
    SELECT lock.objid::integer, coalesce(node.name, '')
    FROM pg_locks AS lock
    LEFT JOIN outbox.node ON node.backend_pid = lock.pid
    WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
        AND lock.classid = hashtext('outbox.lane')::oid
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@asynccontextmanager
async def watched(
    history: History,
    database_url: str,
    *,
    http: str,
    pid: int | Callable[[], int | None],
    relay: str = "",
    path: str = "/readyz",
) -> AsyncIterator[None]:
    """Record readiness (`http`: address:port), memory and transactions until the end of the block.

    `pid`: the process id, or a function that returns it; None while no process runs.
    """
    find_pid = pid if callable(pid) else lambda: pid
    async with asyncio.TaskGroup() as tasks:
        watching = [
            tasks.create_task(_probe(history, http, path, relay), name="watch.ready"),
            tasks.create_task(_measure(history, database_url, find_pid), name="watch.measure"),
        ]
        yield
        for task in watching:
            task.cancel()


@asynccontextmanager
async def looked_at(history: History, database_url: str) -> AsyncIterator[None]:
    """Record the holders of the lanes' locks until the end of the block."""
    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(_look(history, database_url), name="watch.owners")
        yield
        looking.cancel()


async def is_ready(http: str, path: str = "/readyz") -> bool:
    """Whether the relay at address:port answers that it is ready."""
    host, _, port = http.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except OSError:
        return False


async def _probe(history: History, http: str, path: str, relay: str) -> None:
    while True:
        history.append(Probed(await is_ready(http, path), relay))
        await asyncio.sleep(INTERVAL)


async def _measure(history: History, database_url: str, pid: Callable[[], int | None]) -> None:
    async for connection in _connections(database_url):
        with suppress(psycopg.OperationalError):
            while True:
                (oldest,) = await (await connection.execute(OLDEST)).fetchone() or (0.0,)
                if (found := pid()) is not None:
                    with suppress(FileNotFoundError, ProcessLookupError):  # it was killed since
                        history.append(Measured(resident_bytes(found), oldest))
                await asyncio.sleep(INTERVAL)


async def _look(history: History, database_url: str) -> None:
    async for connection in _connections(database_url):
        with suppress(psycopg.OperationalError):
            while True:
                owners = await (await connection.execute(OWNERS)).fetchall()
                history.append(Owned(dict(owners)))
                await asyncio.sleep(LOOK_INTERVAL)


async def _connections(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """Yield one connection after the other."""
    while True:
        with suppress(psycopg.OperationalError):
            async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
                yield connection
        await asyncio.sleep(LOOK_INTERVAL)
