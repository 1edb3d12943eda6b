"""Drop days that are older than is to be kept, one process at a time, beside everybody who uses their table.

look ──> mark ──> detach ──> drop        on a connection of its own; whoever comes next goes on behind the last step

DETACH CONCURRENTLY runs in no function and no transaction, so each step is a transaction of its own
(docs/decisions/0010-detach-concurrently.md). The mark is a comment on the day: a table that somebody else has detached,
to keep it, has none and is left alone.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC
from typing import Any, assert_never

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.database import connect_async, one_line, require_session
from relay.retention.day import MARK, Fate, OldDay, Stage
from relay.retention.kind import Kind
from relay.settings import DatabaseSettings

# So long somebody in the way is waited for, which keeps nobody from writing or marking.
LOCK_TIMEOUT = 10.0  # seconds
# UTC: bounds are read as moments, be they dates or moments themselves.
PREPARE = SQL("""
    SELECT set_config(name, value, false)
    FROM (VALUES ('lock_timeout', {lock_timeout}), ('statement_timeout', '30min'), ('transaction_timeout', '0'),
        ('jit', 'off'), ('max_parallel_workers_per_gather', '0'), ('TimeZone', 'UTC')) AS own (name, value)
    JOIN pg_settings USING (name)
""")
TAKE_LOCK = SQL("SELECT pg_try_advisory_lock(hashtextextended({lock}, 0))")

# What has no first moment is no day.
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
                SELECT DISTINCT pg_get_userbyid(owner)::text FROM unnest(ARRAY[part.relowner, whole.relowner]) AS owner
                WHERE NOT pg_has_role(owner, 'USAGE')
            ) AS owners
        FROM pg_class AS whole
        CROSS JOIN pg_class AS part
        LEFT JOIN pg_inherits ON inhrelid = part.oid
        CROSS JOIN LATERAL (
            SELECT pg_get_expr(part.relpartbound, part.oid) AS bound, obj_description(part.oid, 'pg_class') AS comment,
                CASE WHEN inhparent IS NULL AND part.relname ~ {pattern}
                    THEN to_date(right(part.relname, 8), 'YYYYMMDD')::timestamptz END AS named
        ) AS details
        WHERE whole.oid = to_regclass({parent})
            AND (inhparent = whole.oid
                OR part.relnamespace = whole.relnamespace AND named IS NOT NULL AND comment = {mark})
    ) AS days
    WHERE first IS NOT NULL
        AND (stage = 'detached' OR stage = 'detaching' AND is_marked OR next <= now() - make_interval(days => {keep}))
    ORDER BY first
""")

COMMENT = SQL("COMMENT ON TABLE {day} IS {text}")
DETACH = SQL("ALTER TABLE {whole} DETACH PARTITION {day} CONCURRENTLY")
FINALIZE = SQL("ALTER TABLE {whole} DETACH PARTITION {day} FINALIZE")
DROP = SQL("DROP TABLE {day}")

# Who has locked what a detach or a drop waits for, and whose snapshot is the oldest: a FINALIZE waits for that.
IN_THE_WAY = SQL("""
    SELECT string_agg(DISTINCT coalesce(
        'session ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''), 'a prepared transaction'), ', ')
    FROM (
        SELECT pid FROM pg_locks
        WHERE locktype = 'relation' AND granted AND relation IN (to_regclass({parent}), to_regclass({name}))
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION
        (SELECT pid FROM pg_stat_activity
         WHERE backend_xmin IS NOT NULL AND datname = current_database() AND pid <> pg_backend_pid()
         ORDER BY age(backend_xmin) DESC LIMIT 1)
    ) AS holder
    LEFT JOIN pg_stat_activity USING (pid)
    WHERE pid IS DISTINCT FROM pg_backend_pid()
""")


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
        (is_taken,) = (await self._rows(TAKE_LOCK.format(lock=Literal(f"{self._schema}.retention"))))[0]
        return bool(is_taken)

    async def old_days(self, kind: Kind, keep: int) -> list[OldDay]:
        """Give the days that ended `keep` days ago or before, and those that an earlier round began with; uncounted."""
        statement = OLD_DAYS.format(
            mark=Literal(MARK),
            keep=Literal(keep),
            parent=Literal(f"{self._schema}.{kind.parent}"),
            pattern=Literal(f"^{kind.parent}_[0-9]{{8}}$"),
        )
        found = []
        for name, first, end, stage, is_marked, size, owners, role in await self._rows(statement):
            bounds = (first.astimezone(UTC), end.astimezone(UTC))
            day = OldDay(kind, name, *bounds, Stage(stage), is_marked, size)
            found.append(day.postponed(self._missing_grant(kind, owners, role)) if owners else day)
        return found

    async def look(self, day: OldDay) -> OldDay:
        """Count its rows, which reads the whole day, and see whether anything is in the way."""
        if day.fate is Fate.POSTPONED:
            return day
        rows, unfit = await self._row(day.kind.count, day)
        day = replace(day, rows=rows)
        if unfit:
            return day.postponed(f"{unfit} of its rows are {day.kind.unfit}: look at {self._schema}.{day.table}")
        if day.stage is Stage.DETACHING and not day.is_marked:
            return day.postponed("somebody else began to detach it: DETACH PARTITION ... FINALIZE ends that")
        if day.stage is Stage.ATTACHED and (needed := await self._needed_by(day)):
            return day.postponed(needed)
        return day

    async def drop(self, day: OldDay) -> OldDay:
        """Drop a day that was looked at; what is in the way postpones it, and the next call goes on from there."""
        if day.fate is Fate.POSTPONED:
            return day
        try:
            if day.stage is Stage.ATTACHED and (needed := await self._mark(day)):
                return day.postponed(needed)
            await self._detach(day)
            await self._execute(DROP, day)
        except psycopg.Error as error:
            if self._connection.closed:
                raise
            return day.postponed(await self._explain(error, day))
        return replace(day, fate=Fate.DROPPED)

    async def _mark(self, day: OldDay) -> str:
        """Tell all that the day is going, unless somebody needs it: then say who."""
        async with self._connection.transaction():
            await self._execute(day.kind.going, day)
            needed = await self._needed_by(day)
            await self._execute(COMMENT, day, text=Literal(None if needed else MARK))
        return needed

    async def _detach(self, day: OldDay) -> None:
        match day.stage:
            case Stage.ATTACHED:
                await self._execute(DETACH, day)
            case Stage.DETACHING:
                await self._execute(FINALIZE, day)
            case Stage.DETACHED:
                pass
            case _:
                assert_never(day.stage)

    async def _needed_by(self, day: OldDay) -> str:
        (needed,) = await self._row(day.kind.needed_by, day)
        return needed or ""

    def _missing_grant(self, kind: Kind, owners: list[str], role: str) -> str:
        grants = SQL("GRANT {} TO {}").format(SQL(", ").join(map(Identifier, owners)), Identifier(role))
        return (
            f"only its owner may drop it, and role {role} is not one: `{grants.as_string(self._connection)}`,"
            f' see `relay config roles`; or {kind.setting} = "off"'
        )

    async def _explain(self, error: psycopg.Error, day: OldDay) -> str:
        words = error.diag.message_primary or one_line(error)
        if not isinstance(error, errors.LockNotAvailable | errors.QueryCanceled):
            return words
        (holders,) = await self._row(IN_THE_WAY, day)
        return f"{words}: {holders or 'whoever was in the way is gone'}"

    def _sql(self, statement: SQL, day: OldDay, **more: Literal) -> Composed:
        return statement.format(
            schema=Identifier(self._schema),
            prefix=Literal(self._schema),
            whole=Identifier(self._schema, day.kind.parent),
            parent=Literal(f"{self._schema}.{day.kind.parent}"),
            day=Identifier(self._schema, day.table),
            name=Literal(f"{self._schema}.{day.table}"),
            first=Literal(day.first),
            next=Literal(day.next),
            rows=Literal(day.rows),
            **more,
        )

    async def _execute(self, statement: SQL, day: OldDay, **more: Literal) -> None:
        await self._connection.execute(self._sql(statement, day, **more))

    async def _row(self, statement: SQL, day: OldDay) -> tuple[Any, ...]:
        (row,) = await self._rows(self._sql(statement, day))
        return row

    async def _rows(self, statement: Composed) -> list[tuple[Any, ...]]:
        return await (await self._connection.execute(statement)).fetchall()
