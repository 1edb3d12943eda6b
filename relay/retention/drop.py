"""Drop days that are older than retention allows, one process at a time, next to everybody who uses their table.

A function of the tables' owner checks a day and drops it in one transaction, so no step can be left half done
(docs/decisions/0027-drop-a-day-by-a-function.md). A table that an operator has detached, to keep it, is no day.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.config.settings import DatabaseSettings
from relay.retention.day import Fate, OldDay
from relay.retention.kind import FORGET, FORGET_BATCHES, DatedTable
from relay.servers.postgres.database import connect_async, one_line

PREPARE = """
    SET statement_timeout = '30min';
    SET jit = off;
    SET max_parallel_workers_per_gather = 0
"""
TAKE_LOCK = SQL("SELECT pg_try_advisory_lock(hashtextextended({lock}, 0))")

OLD_DAYS = SQL("""
    SELECT relname, day, pg_total_relation_size(oid), has_function_privilege({function}, 'EXECUTE'), current_user
    FROM (
        SELECT oid, relname, to_date(right(relname, 8), 'YYYYMMDD') AS day
        FROM pg_inherits JOIN pg_class ON oid = inhrelid
        WHERE inhparent = to_regclass({parent}) AND NOT inhdetachpending AND relname ~ {pattern}
    ) AS part
    WHERE day < (now() AT TIME ZONE 'UTC')::date - {keep}
    ORDER BY day
""")

MAY_CALL = SQL("SELECT has_function_privilege({function}, 'EXECUTE')")
FORGET_FAILURES = SQL("SELECT {schema}.forget_failures({keep})")  # some thousands at a time
FORGET_BATCHES_ONCE = SQL("SELECT {schema}.forget_batches({keep}, {dry_run})")

# Who holds a lock that the drop waits for.
IN_THE_WAY = SQL("""
    SELECT string_agg(DISTINCT coalesce(
        'session ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''), 'a prepared transaction'), ', ')
    FROM pg_locks LEFT JOIN pg_stat_activity USING (pid)
    WHERE granted AND pid IS DISTINCT FROM pg_backend_pid()
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (locktype = 'relation'
                AND relation IN (to_regclass({parent}), to_regclass({name}), to_regclass({memory}))
            OR locktype = 'advisory' AND objsubid = 1
                AND classid::bigint << 32 | objid::bigint = hashtextextended({making}, 0))
""")


class Retention:
    """A connection that may drop days, until its block ends."""

    def __init__(self, connection: AsyncConnection, schema: str) -> None:
        self._connection = connection
        self._schema = schema

    @classmethod
    @asynccontextmanager
    async def open(cls, database: DatabaseSettings) -> "AsyncIterator[Retention]":
        """Connect; the caller takes the lock before it drops anything.

        Raises:
            DatabaseUnavailableError, ConfigurationError: as `connect_async`.
        """
        async with await connect_async(
            database, application_name="outbox-relay retention", target_session_attrs="read-write"
        ) as connection:
            await connection.execute(PREPARE)
            yield cls(connection, database.schema_name)

    async def take_lock(self) -> bool:
        """Take the lock of the one that drops. Return whether no other session has it."""
        (is_taken,) = (await self._rows(TAKE_LOCK.format(lock=Literal(f"{self._schema}.retention"))))[0]
        return bool(is_taken)

    async def old_days(self, kind: DatedTable, keep: int) -> list[OldDay]:
        """Return the days that ended `keep` days ago or before, uncounted."""
        statement = OLD_DAYS.format(
            keep=Literal(keep),
            parent=Literal(f"{self._schema}.{kind.parent}"),
            pattern=Literal(f"^{kind.parent}_[0-9]{{8}}$"),
            function=Literal(f"{self._schema}.{kind.function}"),
        )
        found = []
        for name, day, size, may_drop, role in await self._rows(statement):
            old = OldDay(kind, name, day, size)
            found.append(old if may_drop else old.postponed(self._missing_grant(kind, role)))
        return found

    async def look(self, day: OldDay) -> OldDay:
        """Count its rows, which reads the whole day, and see whether anything keeps it."""
        return await self._call(day, dry_run=True)

    async def drop(self, day: OldDay) -> OldDay:
        """Count its rows and drop it; the caller tries again later what is postponed."""
        return await self._call(day, dry_run=False)

    async def forget_failures(self, keep: int) -> int:
        """Delete the causes of which no row is parked, and that were seen and retried `keep` days ago or before.

        Return their number; 0 where this role may not.
        """
        if not await self._may_call(FORGET):
            return 0
        return await self._forget(FORGET_FAILURES.format(schema=Identifier(self._schema), keep=Literal(keep)))

    async def forget_batches(self, keep: int) -> int:
        """Delete the names of Spark's batches that ended `keep` days ago or before, and are not the newest of a job.

        Return their number; 0 where this role may not.
        """
        if not await self._may_call(FORGET_BATCHES):
            return 0
        return await self._forget(self._batches(keep, dry_run=False))

    async def old_batches(self, keep: int) -> int:
        """Return how many names of batches `forget_batches` would delete; 0 where this role may not."""
        if not await self._may_call(FORGET_BATCHES):
            return 0
        ((number,),) = await self._rows(self._batches(keep, dry_run=True))
        return int(number)

    def _batches(self, keep: int, *, dry_run: bool) -> Composed:
        return FORGET_BATCHES_ONCE.format(schema=Identifier(self._schema), keep=Literal(keep), dry_run=Literal(dry_run))

    async def _may_call(self, function: str) -> bool:
        return await self._rows(MAY_CALL.format(function=Literal(f"{self._schema}.{function}"))) == [(True,)]

    async def _forget(self, statement: Composed) -> int:
        forgotten = 0
        while (some := (await self._rows(statement))[0][0]) > 0:
            forgotten += some
        return forgotten

    async def _call(self, day: OldDay, *, dry_run: bool) -> OldDay:
        if day.fate is Fate.POSTPONED:
            return day
        call = SQL(day.kind.call).format(
            schema=Identifier(self._schema), day=Literal(day.day), dry_run=Literal(dry_run)
        )
        try:
            ((rows, kept_by),) = await self._rows(SQL("SELECT rows, kept_by FROM {}").format(call))
        except psycopg.Error as error:
            if self._connection.closed:
                raise
            return day.postponed(await self._explain(error, day))
        day = replace(day, rows=rows)
        if kept_by:
            return day.postponed(kept_by)
        return day if dry_run else replace(day, fate=Fate.DROPPED)

    def _missing_grant(self, kind: DatedTable, role: str) -> str:
        function = f"{Identifier(self._schema).as_string(self._connection)}.{kind.function}"
        user = Identifier(role).as_string(self._connection)
        return (
            f"role {role} may not drop it: `GRANT EXECUTE ON FUNCTION {function} TO {user}`, or grant it"
            f' outbox_retention, which `relay config roles` makes; or {kind.setting} = "off"'
        )

    async def _explain(self, error: psycopg.Error, day: OldDay) -> str:
        words = error.diag.message_primary or one_line(error)
        if not isinstance(error, errors.LockNotAvailable | errors.QueryCanceled):
            return words
        statement = IN_THE_WAY.format(
            parent=Literal(f"{self._schema}.{day.kind.parent}"),
            name=Literal(f"{self._schema}.{day.table}"),
            memory=Literal(f"{self._schema}.inbox_memory"),
            making=Literal(f"{self._schema}.replay and retention"),
        )
        ((holders,),) = await self._rows(statement)
        return f"{words}: {holders or 'the session in the way has ended since'}"

    async def _rows(self, statement: Composed) -> list[tuple[Any, ...]]:
        return await (await self._connection.execute(statement)).fetchall()
