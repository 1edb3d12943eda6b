"""Drop the days of sent rows that are older than is to be kept, one process at a time, beside the engine.

look ──> mark ──> detach ──> drop        on a connection of its own; whoever comes next goes on behind the last step

DETACH CONCURRENTLY runs in no function and no transaction, so each step is a transaction of its own
(docs/decisions/0010-detach-concurrently.md). The mark is a comment on the day: a table that somebody else has detached,
to keep it, has none and is left alone.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Any, assert_never

import psycopg
import structlog
from psycopg import AsyncConnection, errors
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.database import connect_async, one_line, require_session
from relay.errors import OutboxError
from relay.settings import DatabaseSettings, Settings

log = structlog.get_logger(__name__)

FIRST_AFTER, INTERVAL = 180.0, 3600.0  # seconds: a start has other things to do, and days are in no hurry
MARK = "outbox retention drops this day"

# So long somebody in the way is waited for, which keeps nobody from writing or marking.
LOCK_TIMEOUT = 10.0  # seconds
PREPARE = SQL("""
    SELECT set_config(name, value, false)
    FROM (VALUES ('lock_timeout', {lock_timeout}), ('statement_timeout', '30min'), ('transaction_timeout', '0'),
        ('jit', 'off'), ('max_parallel_workers_per_gather', '0')) AS own (name, value)
    JOIN pg_settings USING (name)
""")
TAKE_LOCK = SQL("SELECT pg_try_advisory_lock(hashtextextended({lock}, 0))")

# The bounds are read in the session that has written them, so its time zone and date style do not matter.
OLD_DAYS = SQL("""
    SELECT name, first, next, stage, is_marked, pg_total_relation_size(part) AS size, owners, current_user
    FROM (
        SELECT part.oid AS part, part.relname AS name,
            coalesce(substring(bound FROM $$FROM \\('([^']+)'\\)$$)::timestamptz, named) AS first,
            coalesce(substring(bound FROM $$TO \\('([^']+)'\\)$$)::timestamptz, named + interval '1 day') AS next,
            CASE WHEN inhparent IS NULL THEN 'detached' WHEN inhdetachpending THEN 'detaching' ELSE 'attached' END
                AS stage,
            coalesce(comment = {mark}, false) AS is_marked,
            ARRAY(
                SELECT DISTINCT pg_get_userbyid(owner)::text FROM unnest(ARRAY[part.relowner, sent.relowner]) AS owner
                WHERE NOT pg_has_role(owner, 'USAGE')
            ) AS owners
        FROM pg_class AS sent
        CROSS JOIN pg_class AS part
        LEFT JOIN pg_inherits ON inhrelid = part.oid
        CROSS JOIN LATERAL (
            SELECT pg_get_expr(part.relpartbound, part.oid) AS bound, obj_description(part.oid, 'pg_class') AS comment,
                CASE WHEN inhparent IS NULL AND part.relname ~ '^message_sent_[0-9]{{8}}$'
                    THEN to_date(right(part.relname, 8), 'YYYYMMDD')::timestamp AT TIME ZONE 'UTC' END AS named
        ) AS details
        WHERE sent.oid = to_regclass({sent})
            AND (inhparent = sent.oid
                OR part.relnamespace = sent.relnamespace AND named IS NOT NULL AND comment = {mark})
    ) AS days
    WHERE stage = 'detached' OR stage = 'detaching' AND is_marked OR next <= now() - make_interval(days => {keep})
    ORDER BY first
""")

# Its constraint lets nothing else in; looked at all the same, since a drop cannot be undone.
COUNT = SQL("SELECT count(*), count(*) FILTER (WHERE state IS DISTINCT FROM 'sent' OR sent_at IS NULL) FROM {day}")

# A replay selects what was sent before it was made. One that was interrupted can be resumed.
NEEDED_BY = SQL("""
    SELECT string_agg(id::text, ', ' ORDER BY id) FROM {schema}.replay
    WHERE state = 'open' AND coalesce((filter ->> 'since')::timestamptz, '-infinity') < {next}
        AND least((filter ->> 'until')::timestamptz, made_at) > {first}
""")

# Making a replay takes it shared (relay/replay/job.py): it is made before the day is marked, and keeps the day, or
# after, and then its maker is told from which day on there are rows.
REPLAY_LOCK = SQL("hashtextextended({name} || '.replay and retention', 0)")
TAKE_REPLAY_LOCK = SQL("SELECT pg_advisory_xact_lock({lock})")
COMMENT = SQL("COMMENT ON TABLE {day} IS {text}")

DETACH = SQL("ALTER TABLE {schema}.message_sent DETACH PARTITION {day} CONCURRENTLY")
FINALIZE = SQL("ALTER TABLE {schema}.message_sent DETACH PARTITION {day} FINALIZE")
DROP = SQL("DROP TABLE {day}")

# Who has locked what a detach or a drop waits for, and whose snapshot is the oldest: a FINALIZE waits for that.
IN_THE_WAY = SQL("""
    SELECT string_agg(DISTINCT coalesce(
        'session ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''), 'a prepared transaction'), ', ')
    FROM (
        SELECT pid FROM pg_locks
        WHERE locktype = 'relation' AND granted AND relation IN (to_regclass({sent}), to_regclass({day}))
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION
        (SELECT pid FROM pg_stat_activity
         WHERE backend_xmin IS NOT NULL AND datname = current_database() AND pid <> pg_backend_pid()
         ORDER BY age(backend_xmin) DESC LIMIT 1)
    ) AS holder
    LEFT JOIN pg_stat_activity USING (pid)
    WHERE pid IS DISTINCT FROM pg_backend_pid()
""")


class Stage(StrEnum):
    """How far an earlier round came with a day."""

    ATTACHED = "attached"
    DETACHING = "detaching"  # left pending: new queries do not see it, older ones may
    DETACHED = "detached"  # a table of its own


class Fate(StrEnum):
    """What becomes of a day that is older than what is kept."""

    OLD = "old"  # nothing is in the way
    POSTPONED = "postponed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OldDay:
    """A partition of sent rows that are all older than what is kept."""

    table: str
    first: datetime
    next: datetime  # exclusive
    stage: Stage
    is_marked: bool
    bytes: int  # with indexes and what is stored out of line
    rows: int | None = None  # None: not counted
    fate: Fate = Fate.OLD
    reason: str = ""  # why it is postponed

    @property
    def day(self) -> date:
        return self.first.date()

    def postponed(self, reason: str) -> "OldDay":
        return replace(self, fate=Fate.POSTPONED, reason=reason)


class Retention:
    """A connection that may drop days, until its block ends."""

    def __init__(self, connection: AsyncConnection, schema: str) -> None:
        self._connection = connection
        self._schema = schema

    @classmethod
    @asynccontextmanager
    async def open(cls, database: DatabaseSettings) -> "AsyncIterator[Retention]":
        """Connect; whoever is to drop something takes the lock next.

        Raises:
            DatabaseUnavailableError, ConfigurationError: as `connect_async` and `require_session`.
        """
        async with await connect_async(
            database, application_name="outbox-relay retention", target_session_attrs="read-write"
        ) as connection:
            await require_session(connection, database)
            await connection.execute(PREPARE.format(lock_timeout=Literal(f"{LOCK_TIMEOUT:g}s")))
            yield cls(connection, database.schema_name)

    async def take_lock(self) -> bool:
        """Be the one that drops; False while another one is."""
        return bool((await self._row(TAKE_LOCK, lock=Literal(f"{self._schema}.retention")))[0])

    async def old_days(self, keep: int) -> list[OldDay]:
        """Give the days that ended `keep` days ago or before, and those that an earlier round began with; uncounted."""
        statement = self._sql(OLD_DAYS, mark=Literal(MARK), keep=Literal(keep))
        found = []
        for name, first, end, stage, is_marked, size, owners, role in await self._rows(statement):
            bounds = (first.astimezone(UTC), end.astimezone(UTC))
            day = OldDay(name, *bounds, Stage(stage), is_marked, size)
            found.append(day.postponed(self._missing_grant(owners, role)) if owners else day)
        return found

    async def look(self, day: OldDay) -> OldDay:
        """Count its rows, which reads the whole day, and see whether anything is in the way."""
        if day.fate is Fate.POSTPONED:
            return day
        rows, unsent = await self._row(COUNT, day=self._name(day))
        day = replace(day, rows=rows)
        if unsent:
            return day.postponed(f"{unsent} of its rows are not sent: look at {self._schema}.{day.table}")
        if day.stage is Stage.DETACHING and not day.is_marked:
            return day.postponed("somebody else began to detach it: DETACH PARTITION ... FINALIZE ends that")
        if day.stage is Stage.ATTACHED and (jobs := await self._needed_by(day)):
            return day.postponed(jobs)
        return day

    async def drop(self, day: OldDay) -> OldDay:
        """Drop a day that was looked at; what is in the way postpones it, and the next call goes on from there."""
        if day.fate is Fate.POSTPONED:
            return day
        try:
            if day.stage is Stage.ATTACHED and (jobs := await self._mark(day)):
                return day.postponed(jobs)
            await self._detach(day)
            await self._execute(DROP, day=self._name(day))
        except psycopg.Error as error:
            if self._connection.closed:
                raise
            return day.postponed(await self._explain(error, day))
        return replace(day, fate=Fate.DROPPED)

    async def _mark(self, day: OldDay) -> str:
        """Tell all that the day is going, unless a replay needs it: then say which."""
        async with self._connection.transaction():
            await self._execute(TAKE_REPLAY_LOCK, lock=replay_lock(self._schema))
            jobs = await self._needed_by(day)
            await self._execute(COMMENT, day=self._name(day), text=Literal(None if jobs else MARK))
        return jobs

    async def _detach(self, day: OldDay) -> None:
        match day.stage:
            case Stage.ATTACHED:
                await self._execute(DETACH, day=self._name(day))
            case Stage.DETACHING:
                await self._execute(FINALIZE, day=self._name(day))
            case Stage.DETACHED:
                pass
            case _:
                assert_never(day.stage)

    async def _needed_by(self, day: OldDay) -> str:
        (jobs,) = await self._row(NEEDED_BY, first=Literal(day.first), next=Literal(day.next))
        return f"replay {jobs} needs it: `relay replay --resume` or `relay replay cancel` ends that" if jobs else ""

    def _missing_grant(self, owners: list[str], role: str) -> str:
        grants = SQL("GRANT {} TO {}").format(SQL(", ").join(map(Identifier, owners)), Identifier(role))
        return (
            f"only its owner may drop it, and role {role} is not one: `{grants.as_string(self._connection)}`,"
            ' see config/roles.sql; or relay.retention = "off"'
        )

    async def _explain(self, error: psycopg.Error, day: OldDay) -> str:
        words = error.diag.message_primary or one_line(error)
        if not isinstance(error, errors.LockNotAvailable | errors.QueryCanceled):
            return words
        (holders,) = await self._row(IN_THE_WAY, day=Literal(f"{self._schema}.{day.table}"))
        return f"{words}: {holders or 'whoever was in the way is gone'}"

    def _name(self, day: OldDay) -> Identifier:
        return Identifier(self._schema, day.table)

    def _sql(self, statement: SQL, **names: Any) -> Composed:
        sent = Literal(f"{self._schema}.message_sent")
        return statement.format(schema=Identifier(self._schema), sent=sent, **names)

    async def _execute(self, statement: SQL, **names: Any) -> None:
        await self._connection.execute(self._sql(statement, **names))

    async def _rows(self, statement: Composed) -> list[tuple[Any, ...]]:
        return await (await self._connection.execute(statement)).fetchall()

    async def _row(self, statement: SQL, **names: Any) -> tuple[Any, ...]:
        (row,) = await self._rows(self._sql(statement, **names))
        return row


def replay_lock(schema: str) -> Composed:
    """Give the number of the lock between who makes a replay (shared) and who marks a day."""
    return REPLAY_LOCK.format(name=Literal(schema))


async def keep_days(settings: Settings) -> None:
    """Drop old days now and then, for as long as the node runs; what fails is told, and tried again."""
    keep = settings.relay.retention_days
    if keep is None:
        return
    await asyncio.sleep(FIRST_AFTER)
    while True:
        try:
            await drop_old_days(settings.database, keep)
        except (psycopg.Error, OutboxError) as error:
            log.warning("retention.failed", reason=one_line(error))
        await asyncio.sleep(INTERVAL)


async def drop_old_days(database: DatabaseSettings, keep: int) -> None:
    """Go once over the days older than `keep` days, unless another process does, and log what becomes of each."""
    postponed: dict[str, list[str]] = {}
    async with Retention.open(database) as retention:
        if not await retention.take_lock():
            return
        for day in await retention.old_days(keep):
            started = time.monotonic()
            done = await retention.drop(await retention.look(day))
            if done.fate is Fate.POSTPONED:
                postponed.setdefault(done.reason, []).append(str(done.day))
            else:
                seconds = round(time.monotonic() - started, 1)
                log.info("retention.dropped", day=str(done.day), rows=done.rows, bytes=done.bytes, seconds=seconds)
    for reason, days in postponed.items():
        log.warning("retention.postponed", days=days, reason=reason)
