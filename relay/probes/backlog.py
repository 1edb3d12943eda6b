"""Count what waits in the table, seldom and apart from the engine: on a separate connection, and only when asked."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.engine.session.session import LANES
from relay.errors import DatabaseUnavailableError
from relay.logger import get_logger
from relay.operate.batches import IS_UNFINISHED, number_of
from relay.operate.status import BY_INDEX, COUNT_PARKED, COUNT_PENDING, OLDEST_PENDING
from relay.probes.cached_answer import CachedAnswer
from relay.retention.kind import INBOX, SENT
from relay.servers.postgres.database import connect_async, one

log = get_logger(__name__)

COUNT_QUARANTINED = SQL("""
    SELECT (SELECT count(*) FROM {schema}.quarantine WHERE paused_at IS NULL),
        (SELECT count(*) FROM {schema}.quarantine WHERE paused_at IS NOT NULL),
        (SELECT count(*) FROM {schema}.lane_pause),
        (SELECT messages FROM {schema}.message_count WHERE state = 'quarantined')
""")

# `keep` is NULL where retention is off: then no day is too old.
COUNT_OVERDUE = SQL("""
    SELECT count(*) FILTER (WHERE parent = to_regclass({sent}) AND day < today - {keep_sent}::integer),
        count(*) FILTER (WHERE parent = to_regclass({inbox}) AND day < today - {keep_inbox}::integer)
    FROM (
        SELECT inhparent AS parent, to_date(right(relname, 8), 'YYYYMMDD') AS day,
            (now() AT TIME ZONE 'UTC')::date AS today
        FROM pg_inherits JOIN pg_class ON oid = inhrelid
        WHERE inhparent IN (to_regclass({sent}), to_regclass({inbox}))
            AND NOT inhdetachpending AND relname ~ '_[0-9]{{8}}$'
    ) AS part
""")

# A role that was granted its rights by an earlier release may not read it.
MAY_READ_ARCHIVED = SQL("SELECT has_table_privilege({archived}, 'SELECT')")
# Nobody who has never archived a day is behind with it, unless retention waits for that.
COUNT_UNARCHIVED = SQL("""
    SELECT count(*)
    FROM pg_inherits JOIN pg_class ON oid = inhrelid
    WHERE inhparent = to_regclass({sent}) AND NOT inhdetachpending AND relname ~ '_[0-9]{{8}}$'
        AND to_date(right(relname, 8), 'YYYYMMDD') < (now() AT TIME ZONE 'UTC')::date
        AND to_date(right(relname, 8), 'YYYYMMDD') NOT IN (SELECT day FROM {schema}.archived_day)
        AND ({waits} OR EXISTS (SELECT FROM {schema}.archived_day))
""")

# How long one has been begun, and how long it has written no piece: a job that runs writes some.
COUNT_UNFINISHED = SQL("""
    SELECT count(*), coalesce(max(extract(epoch FROM now() - committed_at)), 0)::float8,
        coalesce(max(extract(epoch FROM now() - greatest(committed_at, last_at))), 0)::float8
    FROM {schema}.batch
    CROSS JOIN LATERAL (
        SELECT max(committed_at) AS last_at FROM {schema}.batch AS piece
        WHERE piece.app_id = batch.app_id AND piece.version = batch.version AND piece.partition >= 0
    ) AS written
    WHERE {is_unfinished}
""")
COUNT_RECENT = SQL("""
    SELECT count(*), coalesce(sum({rows}), 0)::float8, coalesce(max({seconds}), 0)::float8,
        coalesce(sum({repeats}), 0)::float8
    FROM {schema}.batch
    WHERE partition = -1 AND committed_at > now() - interval '1 hour'
""")


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of Spark in the ledger."""

    unfinished: int  # begun in pieces, and neither committed nor given up
    oldest_age: float  # seconds since that one of them was begun; 0 when there is no such batch
    longest_idle: float  # seconds since that one of them has written a piece
    recent: int  # that are committed within an hour
    recent_rows: float
    recent_seconds: float  # that the longest of them took
    recent_repeats: float  # how often they came again


@dataclass(frozen=True, slots=True)
class Counts:
    """What is in the table, whichever application wrote it and whichever relay carries it."""

    pending: int
    oldest_pending_age: float  # seconds; 0 when nothing is due
    parked: int
    parked_held: int  # of these, rows that wait behind another one of their key
    quarantined_routes: int  # without those that are paused
    paused_routes: int
    paused_lanes: int
    quarantined: int
    overdue_days: Mapping[str, int]  # by table: days that are older than is kept
    batches: Batches
    unarchived_days: int | None  # ended days of sent rows; 0 where no archive is in use, None: the role may not know


class Backlog:
    """Counts of one outbox table."""

    def __init__(self, database: DatabaseSettings, relay: RelaySettings) -> None:
        self._database = database
        self._relay = relay
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
            parked, heads = await self._row(connection, COUNT_PARKED)
            routes, paused_routes, paused_lanes, quarantined = await self._row(connection, COUNT_QUARANTINED)
            sent, inbox = await self._row(connection, COUNT_OVERDUE)
            (may_read,) = await self._row(connection, MAY_READ_ARCHIVED)
            (unarchived,) = await self._row(connection, COUNT_UNARCHIVED) if may_read else (None,)
            await connection.execute(BY_INDEX)
            (oldest,) = await self._row(connection, OLDEST_PENDING)
            unfinished = await self._row(connection, COUNT_UNFINISHED)
            recent = await self._row(connection, COUNT_RECENT)
        return Counts(
            pending=pending,
            oldest_pending_age=max(0.0, oldest or 0.0),
            parked=parked,
            parked_held=parked - heads,
            quarantined_routes=routes,
            paused_routes=paused_routes,
            paused_lanes=paused_lanes,
            quarantined=quarantined,
            overdue_days={SENT.parent: sent, INBOX.parent: inbox},
            batches=Batches(*unfinished, *recent),
            unarchived_days=unarchived,
        )

    async def _row(self, connection: psycopg.AsyncConnection, query: SQL) -> tuple[Any, ...]:
        schema = self._database.schema_name
        filled: Composed = query.format(
            schema=Identifier(schema),
            lanes=LANES,
            sent=Literal(f"{schema}.{SENT.parent}"),
            inbox=Literal(f"{schema}.{INBOX.parent}"),
            archived=Literal(f"{schema}.archived_day"),
            keep_sent=Literal(self._relay.retention_days),
            keep_inbox=Literal(self._relay.inbox_retention_days),
            waits=Literal(self._relay.retention_waits_for_archive),
            is_unfinished=SQL(IS_UNFINISHED).format(schema=Identifier(schema)),
            **{name: number_of("batch", name) for name in ("rows", "seconds", "repeats")},
        )
        return one(await (await connection.execute(filled)).fetchone())

    async def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                await self._connection.close()
            self._connection = None
