"""Watch a relay from outside while a drill runs: is it ready, how large is it, how old are its transactions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import LiteralString

import psycopg

from tests.faults.history import History, Measured, Probed
from tests.support.process import resident_bytes

INTERVAL = 0.2  # seconds

OLDEST: LiteralString = """
    SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
    FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'outbox-relay'
"""


@asynccontextmanager
async def watched(history: History, database_url: str, *, http: str, pid: int) -> AsyncIterator[None]:
    """Note readiness (`http`: address:port), memory and transactions until the block is left."""
    async with asyncio.TaskGroup() as tasks:
        watching = [
            tasks.create_task(_probe(history, http), name="watch.ready"),
            tasks.create_task(_measure(history, database_url, pid), name="watch.measure"),
        ]
        yield
        for task in watching:
            task.cancel()


async def _probe(history: History, http: str) -> None:
    host, _, port = http.rpartition(":")
    while True:
        history.append(Probed(await _is_ready(host, int(port))))
        await asyncio.sleep(INTERVAL)


async def _is_ready(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


async def _measure(history: History, database_url: str, pid: int) -> None:
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        while True:
            (oldest,) = await (await connection.execute(OLDEST)).fetchone() or (0.0,)
            history.append(Measured(resident_bytes(pid), oldest))
            await asyncio.sleep(INTERVAL)
