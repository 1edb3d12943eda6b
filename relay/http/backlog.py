"""Count what waits in the table, seldom and apart from the engine: on a separate connection, and only when asked."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from relay.config.settings import DatabaseSettings
from relay.database import connect_async
from relay.errors import DatabaseUnavailableError
from relay.http.cached_answer import CachedAnswer
from relay.logger import get_logger
from relay.operate.status import BY_ORDER, COUNT_PARKED, COUNT_PENDING, OLDEST_PENDING

log = get_logger(__name__)

COUNT_QUARANTINED = SQL("""
    SELECT (SELECT count(*) FROM {schema}.quarantine),
        (SELECT messages FROM {schema}.message_count WHERE state = 'quarantined')
""")
COUNT_UNCOVERED = SQL("SELECT coalesce(sum(uncovered), 0)::bigint FROM {schema}.segment WHERE emptied_at IS NULL")


@dataclass(frozen=True, slots=True)
class Counts:
    """What is in the table, whichever application wrote it and whichever relay carries it."""

    pending: int
    oldest_pending_age: float  # seconds; 0 when nothing is due
    parked: int
    quarantined_routes: int
    quarantined: int
    uncovered: int  # rows of the log that the relay has passed and no receipt names


class Backlog:
    """Counts of one outbox table."""

    def __init__(self, database: DatabaseSettings) -> None:
        self._database = database
        self._connection: psycopg.AsyncConnection | None = None
        self._seldom = CachedAnswer(self._read)
        self._reason = ""

    async def counts(self) -> Counts | None:
        """Return counts, a few seconds old at most unless counting takes longer; None when the last try failed."""
        return await self._seldom.answer()

    async def close(self) -> None:
        await self._seldom.close()
        await self._disconnect()

    async def _read(self) -> Counts | None:
        try:
            async with asyncio.timeout(self._database.command_timeout):
                counts = await self._count()
        except (psycopg.Error, DatabaseUnavailableError, TimeoutError) as error:
            await self._disconnect()
            reason = " ".join(str(error).split()) or f"no answer within {self._database.command_timeout:g} s"
            if reason != self._reason:
                log.warning("backlog.not_counted", reason=reason)
            self._reason = reason
            return None
        self._reason = ""
        return counts

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
            await connection.execute(BY_ORDER)
            (oldest,) = await self._row(connection, OLDEST_PENDING)
            (uncovered,) = await self._row(connection, COUNT_UNCOVERED)
        return Counts(pending, max(0.0, oldest or 0.0), parked, routes, quarantined, uncovered)

    async def _row(self, connection: psycopg.AsyncConnection, query: SQL) -> tuple[Any, ...]:
        filled: Composed = query.format(schema=Identifier(self._database.schema_name))
        row = await (await connection.execute(filled)).fetchone()
        assert row is not None, "an aggregate gives one row"  # noqa: S101
        return row

    async def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                await self._connection.close()
            self._connection = None
