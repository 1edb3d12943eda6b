"""Count what waits in the table, seldom and beside the engine: on a connection of its own, and only when asked."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import structlog
from psycopg.sql import SQL, Composed, Identifier

from relay.database import connect_async
from relay.errors import DatabaseUnavailableError
from relay.operate.status import BY_INDEX, COUNT_PARKED, COUNT_PENDING, LANES, OLDEST_PENDING
from relay.settings import DatabaseSettings

log = structlog.get_logger(__name__)

COUNT_QUARANTINED = SQL("""
    SELECT (SELECT count(*) FROM {schema}.quarantine),
        (SELECT count(*) FROM {schema}.message WHERE state = 'quarantined')
""")

FRESH_FOR = 5.0  # seconds
SHARE = 20  # counting a backlog of millions takes a while: at most this part of the time goes into it
PATIENCE = 2.0  # seconds that one who asks waits for a new count; then the last one has to do


@dataclass(frozen=True, slots=True)
class Counts:
    """What is in the table, whoever wrote it and whichever relay carries it."""

    pending: int
    oldest_pending_age: float  # seconds; 0 when nothing is due
    parked: int
    quarantined_routes: int
    quarantined: int


class Backlog:
    """Counts of one outbox table."""

    def __init__(self, database: DatabaseSettings) -> None:
        self._database = database
        self._connection: psycopg.AsyncConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._counts: Counts | None = None
        self._due_at = 0.0  # loop time
        self._reason = ""

    async def counts(self) -> Counts | None:
        """Give counts, a few seconds old at most unless counting takes longer; None when the last try failed."""
        if self._reading is None and asyncio.get_running_loop().time() >= self._due_at:
            self._reading = asyncio.create_task(self._read(), name="backlog")
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=PATIENCE)
        return self._counts

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._disconnect()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._database.command_timeout):
                self._counts = await self._count()
            self._reason = ""
        except (psycopg.Error, DatabaseUnavailableError, TimeoutError) as error:
            self._counts = None
            await self._disconnect()
            reason = " ".join(str(error).split()) or f"no answer within {self._database.command_timeout:g} s"
            if reason != self._reason:
                log.warning("backlog.not_counted", reason=reason)
            self._reason = reason
        finally:
            took = loop.time() - started
            self._due_at = loop.time() + max(FRESH_FOR, SHARE * took)
            self._reading = None

    async def _count(self) -> Counts:
        if self._connection is None:
            self._connection = await connect_async(self._database, application_name="outbox-relay-metrics")
        connection = self._connection
        async with connection.transaction():
            # One snapshot: a row that is being parked must not be counted twice, or not at all.
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            (pending,) = await self._row(connection, COUNT_PENDING)
            parked, _ = await self._row(connection, COUNT_PARKED)
            routes, quarantined = await self._row(connection, COUNT_QUARANTINED)
            await connection.execute(BY_INDEX)
            (oldest,) = await self._row(connection, OLDEST_PENDING)
        return Counts(pending, max(0.0, oldest or 0.0), parked, routes, quarantined)

    async def _row(self, connection: psycopg.AsyncConnection, query: SQL) -> tuple[Any, ...]:
        filled: Composed = query.format(schema=Identifier(self._database.schema_name), lanes=LANES)
        row = await (await connection.execute(filled)).fetchone()
        assert row is not None, "an aggregate gives one row"  # noqa: S101
        return row

    async def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                await self._connection.close()
            self._connection = None
