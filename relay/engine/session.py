"""The database session that holds the lanes: what is read and marked goes through it, and ends with it.

A lane belongs to whoever holds its session advisory lock. Its rows are read and marked on that very session, so a
node that lost the session can neither read nor mark another row.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.sql import SQL, Identifier, Literal

from relay.database import KEEPALIVE, Host, connect_async, one_line, require_session
from relay.engine.row import Row
from relay.errors import CommitUnknownError, DatabaseUnavailableError, DeadlineError, SchemaError
from relay.settings import DatabaseSettings

LANES = 16

# The hot statements must not depend on statistics: those of an empty table make the planner choose a sequential
# scan at the first spike (tests/engine/test_plans.py). This session runs nothing else.
PLANNER = SQL("""
    SET enable_seqscan = off;
    SET enable_bitmapscan = off;
    SET enable_hashjoin = off;
    SET enable_mergejoin = off;
    SET enable_sort = off;
    SET jit = off;
    SET max_parallel_workers_per_gather = 0
""")

# Older servers lack some of them.
SET_TIMEOUTS = SQL("""
    SELECT set_config(name, value, false)
    FROM unnest(%(names)s::text[], %(values)s::text[]) AS own (name, value)
    JOIN pg_settings USING (name)
""")

# One wide row, and libpq keeps an input buffer of its size: 16 KiB else, and a wake-up for each 16 KiB of a window.
WIDE_ROW = SQL("SELECT repeat(' ', 262144)")

REVISION = SQL("SELECT version_num FROM {schema}.migration")
OLDEST_REVISION = "0003"  # what this release needs; a newer one is served: migrations come before the relays

TAKE_LANES = SQL("""
    SELECT lane::smallint
    FROM generate_series(0, 15) AS lane
    WHERE lane <> ALL (%(held)s::integer[]) AND pg_try_advisory_lock(hashtext({schema} || '.lane'), lane)
""")

# Rows can be marked while somebody keeps new days from being made, so this waits for him only for a moment.
ENSURE_DAYS = SQL("""
    SELECT {schema}.ensure_sent_days((now() AT TIME ZONE 'UTC')::date, 3)
    FROM set_config('lock_timeout', '200ms', true)
""")

# Shared: any number of nodes may sleep. A writer that cannot have the lock for itself rings.
TAKE_DOORBELL = SQL("SELECT pg_advisory_lock_shared(hashtextextended({doorbell}, 0))")
LEAVE_DOORBELL = SQL("SELECT pg_advisory_unlock_shared(hashtextextended({doorbell}, 0))")

# Whoever parks, retries or discards takes it: a row can then not be parked behind one that is just leaving.
# A command that releases many rows holds it for long.
PARK_LOCK = SQL("""
    SELECT pg_advisory_xact_lock(hashtextextended({park}, 0)) FROM set_config('lock_timeout', '0', true)
""")


# What ends a session, or makes it useless to us.
SESSION_LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,  # such as: the server has become read-only
    DeadlineError,
    CommitUnknownError,
)


# Pending rows by lane and id (`places`), for statements that change them. The planner can only run a LATERAL with LIMIT
# row by row through the index: statistics taken while a large transaction was still open say that the table is empty,
# and a plain join is then a scan of the backlog for each row.
GIVEN = SQL("""
    unnest(%(lanes)s::smallint[], %(ids)s::bigint[]) AS wanted (lane, id)
    CROSS JOIN LATERAL (
        SELECT ctid AS place, id, aggregate_type, aggregate_id
        FROM {schema}.message_pending
        WHERE lane = wanted.lane AND id = wanted.id
        LIMIT 1
    ) AS given
""")


class LaneSession:
    """A connection and the lanes that it holds; `async with` closes it, which hands the lanes over.

    Attributes:
        host: the server that it is on.
        lanes: the lanes held, ascending.
        wake: set when someone rings or wants the session; ends `rest`.
        written_at: when our last committed change began (monotonic). Its transaction id is above all that were given
            before, so from then on every snapshot names those that still run: a snapshot does not know of running
            transactions above the last one that has ended.
    """

    def __init__(self, connection: AsyncConnection, database: DatabaseSettings) -> None:
        self.host = Host(connection.info.host, connection.info.port)
        self.lanes: list[int] = []
        self.schema = database.schema_name
        self.wake = asyncio.Event()
        self.written_at = 0.0
        self._connection = connection
        self._database = database
        self._command_timeout = database.command_timeout
        self._is_unreplicated = False
        self._lock = asyncio.Lock()
        self._doorbell_held = False
        self._resting = False
        self._loop = asyncio.get_running_loop()
        connection.add_notify_handler(lambda _: self.wake.set())
        connection.add_notice_handler(self._heed)

    @classmethod
    async def open(cls, database: DatabaseSettings, *, last: Host | None = None) -> Self:
        """Connect, without a lane yet.

        Args:
            last: the host to try after all others. It is the one whose session was lost: an old primary that lives on
                beside the new one lets us in, but commits nothing.
        Raises:
            DatabaseUnavailableError: nothing lets us in.
            ConfigurationError: what lets us in is a pooler that keeps no session.
            SchemaError: the outbox tables are missing or too old.
        """
        # A standby may show commits in another order than the primary made them, and cannot be marked on.
        primary = {"application_name": "outbox-relay", "target_session_attrs": "read-write"}
        session = cls(await connect_async(database, last=last, **primary), database)
        try:
            await session._prepare()
        except BaseException:
            await session._connection.close()
            raise
        return session

    async def _prepare(self) -> None:
        try:
            async with asyncio.timeout(self._command_timeout):
                await require_session(self._connection, self._database)
                await self._connection.execute(SET_TIMEOUTS, self._timeouts())
                await self._connection.execute(PLANNER)
                await self._connection.execute(WIDE_ROW)
                cursor = await self._connection.execute(self.sql(REVISION))
                (revision,) = await cursor.fetchone() or ("",)
                if revision < OLDEST_REVISION:
                    raise SchemaError(f"the outbox tables in schema {self.schema!r} are too old: run `relay migrate`")
                await self._connection.execute(SQL("LISTEN {}").format(Identifier(f"{self.schema}.doorbell")))
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
            raise SchemaError(f"the outbox tables are missing in schema {self.schema!r}: run `relay migrate`") from None
        except TimeoutError:
            raise DatabaseUnavailableError(f"no answer within {self._command_timeout:g} s") from None
        except SESSION_LOST as error:
            raise DatabaseUnavailableError(f"the database ended the session: {one_line(error)}") from error

    def _timeouts(self) -> dict[str, list[str]]:
        """Give what the server is to wait for, whatever its defaults are for this role or database.

        It, too, must notice a peer that died silently: until then the lanes are held by nobody.
        """
        own = {
            "statement_timeout": f"{max(1, round(self._command_timeout * 1000))}ms",
            "lock_timeout": "3s",  # whoever waits for somebody's lock says so (relay/engine/patience.py)
            "transaction_timeout": "0",
            "idle_session_timeout": "0",
            "idle_in_transaction_session_timeout": "30s",
        }
        ours = self._connection.info.get_parameters()
        for name in KEEPALIVE.keys() & ours.keys() - {"keepalives"}:
            own[f"tcp_{name.removeprefix('tcp_')}"] = ours[name]
        return {"names": list(own), "values": list(own.values())}

    def _heed(self, notice: psycopg.errors.Diagnostic) -> None:
        # The warning that a commit was made here and maybe nowhere else; its SQLSTATE, 01000, is that of any warning,
        # and its words depend on the server's language.
        if notice.source_function == "SyncRepWaitForLSN":
            self._is_unreplicated = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close()

    def sql(self, statement: SQL, **names: Any) -> bytes:
        """Fill in the schema, and `GIVEN` where asked for.

        As bytes, the driver parses the placeholders of a statement once and not each time.
        """
        schema = Identifier(self.schema)
        return statement.format(schema=schema, given=GIVEN.format(schema=schema), **names).as_bytes()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[AsyncConnection]:
        """Have the connection alone, for statements that answer within the command time-out.

        Raises:
            DeadlineError: they did not; the session cannot be used any more.
            CommitUnknownError: they did, but a failover may undo it; the table is to be read anew.
            psycopg.OperationalError: the session is lost.
        """
        if self._resting:
            self.wake.set()
        async with self._lock:
            try:
                async with asyncio.timeout(self._command_timeout):
                    yield self._connection
            except TimeoutError:
                raise DeadlineError("a statement of the relay", self._command_timeout) from None
            if self._is_unreplicated:
                raise CommitUnknownError

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """`use` the connection for one statement or transaction that changes rows, and note when it began."""
        started = time.monotonic()
        async with self.use() as connection:
            yield connection
        self.written_at = started

    async def rest(self, seconds: float, *, doorbell: bool) -> None:
        """Sleep until someone rings, someone wants the session, or the time is over.

        Call it only after a read that was made while the doorbell lock was held: a writer that committed before
        did not ring.
        """
        # Nobody else waits for the socket meanwhile: `use` wakes us before it takes the lock, and we hold it.
        async with self._lock:
            socket = self._connection.fileno()
            self._resting = True
            if doorbell:
                self._loop.add_reader(socket, self.wake.set)
            try:
                async with asyncio.timeout(seconds):
                    await self.wake.wait()
            except TimeoutError:
                pass
            finally:
                self._resting = False
                if doorbell:
                    self._loop.remove_reader(socket)

    async def hold_doorbell(self, *, hold: bool) -> bool:
        """Ask writers to ring from now on, or no more; tell whether that was a change."""
        if hold is self._doorbell_held:
            return False
        statement = TAKE_DOORBELL if hold else LEAVE_DOORBELL
        async with self.use() as connection:
            await connection.execute(statement.format(doorbell=Literal(f"{self.schema}.doorbell")))
        self._doorbell_held = hold
        return True

    async def take_lanes(self) -> list[int]:
        """Take every lane that is free, and give those that were taken now."""
        async with self.use() as connection:
            statement = TAKE_LANES.format(schema=Literal(self.schema))
            cursor = await connection.execute(statement, {"held": self.lanes})
            taken = [lane for (lane,) in await cursor.fetchall()]
        self.lanes = sorted([*self.lanes, *taken])
        return taken

    async def ensure_days(self) -> None:
        """Make the partitions of today and the next two days (UTC), where they are missing.

        Raises:
            psycopg.errors.LockNotAvailable: somebody has locked the table of sent rows.
        """
        async with self.use() as connection:
            await connection.execute(self.sql(ENSURE_DAYS))

    async def take_park_lock(self, connection: AsyncConnection) -> None:
        """Keep everyone else from parking, retrying and discarding until the end of this transaction."""
        await connection.execute(PARK_LOCK.format(park=Literal(f"{self.schema}.park")))

    def cursor(self) -> AsyncCursor[Any]:
        """Give a cursor for results in binary form."""
        return self._connection.cursor(binary=True)


def array_text(numbers: Iterable[int]) -> str:
    """Write an array as PostgreSQL reads it: the driver's own dumper takes four times as long."""
    return "{" + ",".join(map(str, numbers)) + "}"


def places(rows: Collection[Row]) -> dict[str, str]:
    """Give the parameters of `GIVEN`."""
    return {"lanes": array_text(row.lane for row in rows), "ids": array_text(row.id for row in rows)}
