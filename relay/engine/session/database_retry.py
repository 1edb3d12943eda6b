"""The pauses while a statement fails and the session lives: explain the error, make missing days, wait.

No row passes through here while the database works.
"""

import asyncio
from typing import assert_never

import psycopg
from psycopg import errors
from psycopg.sql import SQL

from relay.engine.session.session import LaneSession
from relay.errors import PublicReason
from relay.logger import get_logger
from relay.runtime.backoff import backoff, wait_for_event
from relay.runtime.health import Health
from relay.runtime.hindrance import Hindrance
from relay.servers.postgres.database import one, public_reason
from relay.servers.postgres.statement_fault import StatementFault, fault_of

log = get_logger(__name__)

RETRY_INITIAL, RETRY_MAX = 0.1, 2.0  # seconds
ENSURE_DAYS_INTERVAL, BLOCKED_DAYS_INTERVAL = 3600.0, 10.0  # seconds

# Rows can be marked while another session keeps new days from being made, so this waits for its lock only a moment.
ENSURE_DAYS = SQL("""
    SELECT {schema}.ensure_sent_days((now() AT TIME ZONE 'UTC')::date, 3)
    FROM set_config('lock_timeout', '200ms', true)
""")

# The sessions whose locks keep rows from being marked, parked or set aside, or days from being made. A prepared
# transaction has no process.
BLOCKERS = SQL("""
    SELECT string_agg(DISTINCT
        coalesce('session ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''),
                 'a prepared transaction')
        || what, ', '), coalesce(array_agg(DISTINCT held.at), '{{}}')
    FROM (
        SELECT pid, ' has locked ' || relname, relname::text
        FROM pg_locks
        JOIN pg_class ON pg_class.oid = relation
        WHERE granted AND (starts_with(relname, 'message') OR relname IN ('quarantine', 'published'))
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND relnamespace = to_regnamespace({name})
            AND (mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
                 OR mode = 'ShareUpdateExclusiveLock' AND relname = 'message_sent')
        UNION
        SELECT pid, ' parks or releases rows', 'park'
        FROM pg_locks
        WHERE granted AND locktype = 'advisory' AND objsubid = 1
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND classid::bigint << 32 | objid::bigint = hashtextextended({park}, 0)
    ) AS held (pid, what, at)
    LEFT JOIN pg_stat_activity USING (pid)
    WHERE pid IS DISTINCT FROM pg_backend_pid()
""")
# What a stranger may know of these sessions, by `held.at`.
BLOCKED_AT = {
    "message": PublicReason.MESSAGE_LOCKED,
    "message_sent": PublicReason.SENT_LOCKED,
    "park": PublicReason.PARKING,
}


class DatabaseRetry:
    """The pauses between the attempts of a node's statements; the log and the health report say what is in the way.

    Args:
        drain: set when the node must stop. The pauses are short from then on, and the caller is cancelled at the end.
    """

    def __init__(self, session: LaneSession, health: Health, *, drain: asyncio.Event) -> None:
        self._session = session
        self._health = health
        self._drain = drain
        self._days_blocked = False

    async def wait(self, error: psycopg.Error, attempts: int) -> None:
        """Return when a statement that has failed so many times may run again.

        Raises:
            psycopg.Error: the error, if the statement must not run again on this session.
        """
        if not self._is_waited_for(fault := fault_of(error)):
            raise error
        reason = await self._reason(error, fault, attempts)
        if not reason:
            return
        self._health.degrade("database", reason)
        if self._drain.is_set():
            await asyncio.sleep(RETRY_INITIAL)
        else:
            await wait_for_event(self._drain, backoff(attempts, RETRY_INITIAL, RETRY_MAX))

    async def report(self, error: psycopg.Error, *, again: bool) -> None:
        """Log why a statement has failed, and show it in the health report.

        If it has waited for a row for the first time, it will pass by itself: another relay moves rows of the route.
        """
        if again or not await self._is_for_a_row(error):
            self._health.degrade("database", await self._explain(error))

    async def _is_for_a_row(self, error: psycopg.Error) -> bool:
        """Whether a statement has waited for a lock, and nobody locks a table."""
        return isinstance(error, errors.LockNotAvailable) and (await self._find_blockers())[0] is None

    def _is_waited_for(self, fault: StatementFault) -> bool:
        match fault:
            case StatementFault.SESSION | StatementFault.TABLES:
                return False
            case StatementFault.RIGHTS:  # without a lane no row is in flight: the relay ends, and says what it lacks
                return bool(self._session.lanes.held)
            case StatementFault.DAY | StatementFault.PASSING | StatementFault.STANDING:
                return True
            case _:
                assert_never(fault)

    async def _reason(self, error: psycopg.Error, fault: StatementFault, attempts: int) -> Hindrance | None:
        """Return why a statement has to wait; None if it may run again at once."""
        if fault is StatementFault.PASSING:
            return await self._explain(error)
        if fault is StatementFault.DAY:  # the clock is past, or before, the days that have partitions
            if not await self.ensure_days():
                blockers = await self._blockers(PublicReason.NO_DAY)
                return Hindrance(f"no partition takes the rows sent today: {blockers}", blockers.public)
            if attempts == 1:
                return None
        hint = "".join(f" {line}" for line in (error.diag.message_hint or "").splitlines())
        words = f"a statement fails until an operator acts: {await self._explain(error)}.{hint} See `relay doctor`"
        return Hindrance(words, PublicReason.STANDING_FAULT)

    def heal(self) -> None:
        """Note that a statement has succeeded after it had failed."""
        self._health.heal("database")

    async def keep_days(self) -> None:
        """Make the partitions of the coming days in time, until cancelled."""
        while True:
            are_made = await self.ensure_days()
            await asyncio.sleep(ENSURE_DAYS_INTERVAL if are_made else BLOCKED_DAYS_INTERVAL)

    async def ensure_days(self) -> bool:
        """Make the partitions of today and the next two days (UTC); return whether they are there."""
        try:
            async with self._session.use() as connection:
                await connection.execute(self._session.sql(ENSURE_DAYS))
        except psycopg.Error as error:
            if not self._is_waited_for(fault_of(error)):
                raise
            if not self._days_blocked:
                log.warning("days.blocked", reason=await self._explain(error))
            self._days_blocked = True
            return False
        if self._days_blocked:
            log.info("days.made")
        self._days_blocked = False
        return True

    async def _explain(self, error: psycopg.Error) -> Hindrance:
        words, public = error.diag.message_primary or str(error), public_reason(error)
        if not isinstance(error, errors.LockNotAvailable):
            return Hindrance(words, public)
        blockers = await self._blockers(public)
        return Hindrance(f"{words}: {blockers}", blockers.public)

    async def _blockers(self, otherwise: str) -> Hindrance:
        """Return which sessions are in the way, else what strangers may know `otherwise`."""
        words, places = await self._find_blockers()
        public = next((public for at, public in BLOCKED_AT.items() if at in places), otherwise)
        return Hindrance(words or "no session holds a lock on it any more", public)

    async def _find_blockers(self) -> tuple[str | None, list[str]]:
        """Return the sessions that lock a table, in words, and which tables these are."""
        async with self._session.use() as connection:
            statement = self._session.sql(BLOCKERS, name=self._session.schema)
            words, places = one(await (await connection.execute(statement)).fetchone())
        return words, places
