"""A candidate for the master of the pools: `relay pool run`, and every `relay run`."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psycopg
from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier, Literal

from relay.config.secret import read_again
from relay.config.settings import DatabaseSettings, Settings
from relay.consume.pool.check_in import pool_channel
from relay.consume.pool.master import IDLE_INTERVAL, Master
from relay.consume.pool.tables import master_lock
from relay.errors import AccessError, DatabaseUnavailableError, OutboxError, SchemaError
from relay.logger import get_logger
from relay.runtime.backoff import Backoff, Stopping, unless_stopping, wait_for_event
from relay.runtime.silence import Silence
from relay.servers.postgres.compatibility import TABLES_MISSING
from relay.servers.postgres.database import connect_async, one_line

STAND_BY_INTERVAL = 0.25  # seconds between two looks whether there is a master, while there are members
MASTER_TIMEOUT = 2.0  # seconds without a sign of the master, after which a candidate ends its session
BACKOFF = Backoff(0.1, 3.0)
END_TIMEOUT = 1.0  # seconds to resign in

TAKE = SQL("SELECT pg_try_advisory_lock(hashtext({lock}), 0)")
ASSUME = SQL("""
    INSERT INTO {schema}.pool_master (name, backend_pid) VALUES (%(name)s, pg_backend_pid())
    ON CONFLICT (is_the_only_row) DO UPDATE
    SET name = excluded.name, backend_pid = excluded.backend_pid, since = now(), seen_at = now()
""")
MASTER = SQL("""
    SELECT backend_pid, seen_at, EXISTS (SELECT FROM {schema}.pool_member) FROM {schema}.pool_master
""")

IN_USE = SQL("""
    SELECT EXISTS (SELECT FROM {schema}.pool_member), EXISTS (SELECT FROM {schema}.pool_master)
""")

# Ends the session that has the lock, if its master has given no sign since `seen_at`.
END = SQL("""
    SELECT pg_terminate_backend(lock.pid)
    FROM pg_locks AS lock JOIN {schema}.pool_master AS master ON master.backend_pid = lock.pid
    WHERE lock.locktype = 'advisory' AND lock.objsubid = 2 AND lock.classid = hashtext({lock})::oid AND lock.objid = 0
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND master.seen_at = %(seen_at)s
""")

RESIGN = SQL("SELECT pg_notify({}, '') FROM pg_advisory_unlock_all() AS given_up")

log = get_logger("relay.pool")


class Candidate:
    """Is the master of the pools, or waits until there is no other master.

    Args:
        beside: a relay runs in the same process, and logs when the database is lost. So the candidate logs a lost
            session only when a pool has members.
    """

    def __init__(self, database: DatabaseSettings, name: str, *, beside: bool = False) -> None:
        self._database = database
        self._name = name
        self._beside = beside
        self._in_use = False  # a pool had members when the database was asked last
        self._is_lost = False
        self._silence = Silence(MASTER_TIMEOUT, MASTER_TIMEOUT)
        self.stopping = asyncio.Event()

    def reload(self) -> None:
        """Read the database's URL again if it comes from a file; the next connection uses it."""
        read_again(self._database.url)

    async def run(self) -> None:
        """Stand by, and be the master when there is no other, until `stopping` is set.

        Raises:
            SchemaError, AccessError, ConfigurationError: at the start. Later it waits until the fault is over.
        """
        with suppress(Stopping):
            await unless_stopping(self.stopping, self._stand())

    async def _stand(self) -> None:
        failures, was_there = 0, False
        while not self.stopping.is_set():
            began = time.monotonic()
            try:
                async with self._session() as connection:
                    was_there = True
                    await self._serve(connection)
            except (psycopg.Error, DatabaseUnavailableError, TimeoutError) as error:
                failures = 1 if time.monotonic() - began > BACKOFF.maximum else failures + 1
                if not self._is_lost and (self._in_use or not self._beside):
                    log.warning("pool.session_lost", reason=one_line(error) or "no answer in time")
                self._is_lost = True  # so that the log says it once, however many tries follow
                await wait_for_event(self.stopping, BACKOFF.seconds(failures))
            except OutboxError:
                if not was_there:
                    raise
                await wait_for_event(self.stopping, BACKOFF.maximum)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[AsyncConnection]:
        connection = await connect_async(
            self._database, application_name="outbox-pool", target_session_attrs="read-write"
        )
        async with connection:
            try:
                row = await (await connection.execute(self._sql(IN_USE))).fetchone()
                self._in_use = row is not None and row[0]
            except TABLES_MISSING:
                schema = self._database.schema_name
                raise SchemaError(f"schema {schema!r} has no tables of pools: run `relay migrate`") from None
            except psycopg.errors.InsufficientPrivilege as error:
                raise AccessError(
                    f"{error.diag.message_primary}: `relay config roles` prints the grants that a master needs"
                ) from None
            await connection.execute(SQL("LISTEN {}").format(Identifier(self._channel)))
            yield connection

    async def _serve(self, connection: AsyncConnection) -> None:
        master = None
        try:
            while not self.stopping.is_set():
                async with asyncio.timeout(self._database.command_timeout):
                    if master is None and await self._has_taken_over(connection):
                        master = Master(connection, self._database.schema_name)
                    if master is None:
                        pause = await self._stand_by(connection)
                    else:
                        pause, self._in_use = await master.look(), master.has_members
                self._is_lost = False
                async for _ in connection.notifies(timeout=pause, stop_after=1):  # a member or a master notifies
                    pass
        finally:
            if master is not None:
                with suppress(psycopg.Error, TimeoutError):  # with a lost session, the lock is gone anyway
                    async with asyncio.timeout(END_TIMEOUT):
                        await connection.execute(RESIGN.format(self._channel))

    async def _has_taken_over(self, connection: AsyncConnection) -> bool:
        """Become the master if no other session is. Return whether this session is the master now."""
        cursor = await connection.execute(self._sql(TAKE))
        if await cursor.fetchone() != (True,):
            return False
        await connection.execute(self._sql(ASSUME), {"name": self._name})
        return True

    async def _stand_by(self, connection: AsyncConnection) -> float:
        """End the session of a frozen master, and return after how many seconds to look again."""
        row = await (await connection.execute(self._sql(MASTER))).fetchone()
        self._in_use = row is not None and row[2]
        if row is None or not self._in_use:  # without members a master gives no signs
            return IDLE_INTERVAL
        if self._silence.look({row[:2]: row}, time.monotonic()):
            try:
                await connection.execute(self._sql(END), {"seen_at": row[1]})
                log.warning("pool.master_ended", pid=row[0], reason=f"no sign of it for {MASTER_TIMEOUT:g} s")
            except psycopg.errors.InsufficientPrivilege as error:
                log.error("pool.master_not_ended", pid=row[0], reason=error.diag.message_primary)
        return STAND_BY_INTERVAL

    def _sql(self, statement: SQL) -> bytes:
        schema = self._database.schema_name
        return statement.format(schema=Identifier(schema), lock=Literal(master_lock(schema))).as_bytes()

    @property
    def _channel(self) -> str:
        return pool_channel(self._database.schema_name)


@asynccontextmanager
async def candidate_beside(settings: Settings) -> AsyncIterator[None]:
    """Run a candidate during the block if `relay.pools` is set. Its failure is logged, and does not end the block."""
    if not settings.relay.pools:
        yield
        return
    candidate = Candidate(settings.database, settings.relay.node, beside=True)
    running = asyncio.create_task(candidate.run(), name="pools")
    running.add_done_callback(_log_end)
    try:
        yield
    finally:
        candidate.stopping.set()
        try:
            await asyncio.wait([running], timeout=END_TIMEOUT)
        finally:
            running.cancel()


def _log_end(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        log.warning("pool.not_served", reason=one_line(error))
