"""The database session that holds the lanes. All reads and marks go through it, and end with it.

A lane belongs to the session that holds its advisory lock. Its rows are read and marked on that very session, so a
node that lost the session can neither read nor mark another row.

Most errors leave the session and its lanes as they are: a full disk, a locked table, a missing day
(relay/servers/postgres/statement_fault.py). The statement is then repeated (`retried`) until it succeeds. Confirmed
rows that cannot be marked stay in the window, which fills; then the relay reads no more, and so sends no more.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from math import inf
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.sql import SQL, Identifier, Literal

from relay.config.settings import DatabaseSettings, KeyScope
from relay.engine.row import Row
from relay.errors import CommitUnknownError, DatabaseUnavailableError, DeadlineError, SchemaError, no_answer_within
from relay.runtime.backoff import wait_for_event
from relay.servers.postgres.compatibility import READ_TABLES, TABLES_MISSING, refuse_newer, tables_missing
from relay.servers.postgres.database import (
    KEEPALIVE,
    OWN_SETTINGS,
    SET_EACH,
    DatabaseConnection,
    Host,
    connect_async,
    is_unreplicated,
    one_line,
    public_reason,
    require_session,
    set_own,
    unplug,
)

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

# After one wide row, libpq keeps an input buffer of its size. Otherwise the buffer has 16 KiB, and the relay wakes up
# for each 16 KiB of a window.
WIDE_ROW = SQL("SELECT repeat(' ', 262144)")

ROUTES_CHANGED = "routes"  # the payload by which an operator's command notifies the nodes; their own has no word

OLDEST_REVISION = "0021"  # what this release needs; it serves newer ones unless their note forbids that

# What ends a session, or makes it useless to the relay.
SESSION_LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,  # such as: the server has become read-only
    DeadlineError,
    CommitUnknownError,
)

LANES = 16

# Shared: any number of nodes may sleep. A writer that cannot get the lock exclusively rings.
TAKE_DOORBELL = SQL("SELECT pg_advisory_lock_shared(hashtextextended({doorbell}, 0))")
LEAVE_DOORBELL = SQL("SELECT pg_advisory_unlock_shared(hashtextextended({doorbell}, 0))")

HALF_TIMEOUT = "SELECT set_config('statement_timeout', %(timeout)s, true)"

# Every command that parks, retries or discards takes it, so that no row is parked behind one that is just leaving.
# A command that releases many rows holds it for long (relay/engine/session/database_retry.py waits).
PARK_LOCK = SQL("SELECT pg_advisory_xact_lock(hashtextextended({park}, 0))")


# Pending rows by lane and id (`places`), for statements that change them. The planner can only run a LATERAL with LIMIT
# row by row through the index. It may run a plain join as a scan of the backlog for each row. Statistics that were
# taken while a large transaction was still open say that the table is empty.
GIVEN = SQL("""
    unnest(%(lanes)s::smallint[], %(ids)s::bigint[]) AS wanted (lane, id)
    CROSS JOIN LATERAL (
        SELECT ctid AS place, id, aggregate_type, aggregate_id, written_as
        FROM {schema}.message_pending
        WHERE lane = wanted.lane AND id = wanted.id
        LIMIT 1
    ) AS given
""")


# What a statement says of the roles that wrote rows. `{key_role}` is the third part of a key. `({any_role} OR
# one.written_as = other.written_as)` says whether two rows of one type and id have one key.
ROLES_ALIKE = {"key_role": SQL("NULL::text"), "any_role": SQL("true")}
ROLES_APART = {"key_role": SQL("written_as"), "any_role": SQL("false")}


def nodes_channel(schema: str) -> str:
    """Return the name of the channel on which nodes notify each other."""
    return f"{schema}.nodes"


async def prepare(connection: AsyncConnection, database: DatabaseSettings) -> None:
    """Make a new connection a session for lanes.

    Raises:
        DatabaseUnavailableError: it does not answer, or was ended.
        ConfigurationError: it is a pooler's, and no session.
        SchemaError: the outbox tables are missing, too old, or of a release that this one cannot serve.
    """
    schema = database.schema_name
    try:
        async with asyncio.timeout(database.command_timeout):
            await require_session(connection, database)
            await connection.execute(SET_EACH, _own_settings(connection, database))
            await connection.execute(PLANNER)
            await connection.execute(WIDE_ROW)
            cursor = await connection.execute(READ_TABLES.format(schema=Identifier(schema)))
            revision, note = await cursor.fetchone() or ("", None)
            if revision < OLDEST_REVISION:
                raise SchemaError(f"the outbox tables in schema {schema!r} are too old: run `relay migrate`")
            refuse_newer(schema, revision, note)
            await connection.execute(SQL("LISTEN {}").format(Identifier(nodes_channel(schema))))
    except TABLES_MISSING:
        raise tables_missing(schema) from None
    except TimeoutError:
        public = no_answer_within(database.command_timeout)
        raise DatabaseUnavailableError(public, public=public) from None
    except SESSION_LOST as error:
        reason = f"the database ended the session: {one_line(error)}"
        raise DatabaseUnavailableError(reason, public=public_reason(error)) from error


def _own_settings(connection: AsyncConnection, database: DatabaseSettings) -> dict[str, Any]:
    """Return what replaces the defaults of this session's role and database.

    The server, too, must notice a peer that died silently: until then no live node holds the lanes.
    """
    own = OWN_SETTINGS | {
        "statement_timeout": f"{max(1, round(database.command_timeout * 1000))}ms",
        "lock_timeout": "3s",  # then the wait for a lock is logged (relay/engine/session/database_retry.py)
        "idle_in_transaction_session_timeout": "30s",
    }
    ours = connection.info.get_parameters()
    for name in KEEPALIVE.keys() & ours.keys() - {"keepalives"}:
        own[f"tcp_{name.removeprefix('tcp_')}"] = ours[name]
    return set_own(own)


class HeldLanes:
    """The lanes that a session holds. Only `nodes.Lanes` changes them; all others read.

    Attributes:
        held: all lanes, ascending.
        leaving: the lanes that the node gives up; no row of them is read or sent.
        staying: the other lanes.
    """

    def __init__(self) -> None:
        self.held: Sequence[int] = []
        self.leaving: Sequence[int] = []
        self.staying: Sequence[int] = []

    def take(self, lanes: Iterable[int]) -> None:
        """Note that these are locked now."""
        self._set({*self.held, *lanes}, {*self.leaving})

    def leave(self, lanes: Iterable[int]) -> None:
        """Note that the node gives these up."""
        self._set({*self.held}, {*self.leaving, *lanes})

    def release(self, lanes: Iterable[int]) -> None:
        """Note that these are no longer held."""
        gone = set(lanes)
        self._set({*self.held} - gone, {*self.leaving} - gone)

    def _set(self, held: set[int], leaving: set[int]) -> None:
        self.held, self.leaving, self.staying = sorted(held), sorted(leaving), sorted(held - leaving)


class LaneSession:
    """A connection and the lanes that it holds. The end of `async with` closes it, which hands over the lanes.

    Attributes:
        host: the server that it is on.
        ended_by: why the server has ended it, when no statement fails with that error.
        lanes: the lanes held.
        nodes_channel: on it a node notifies the others that it has come or gone, or has given up lanes.
        wake: set when a writer rings, or when the session is wanted; ends `rest`.
        nodes_changed: set when another node has notified.
        answered_at: when the last statement that was answered began (monotonic).
        written_at: when the last committed change of this session began (monotonic). A snapshot does not know of
            running transactions above the last one that has ended. The id of that change is above all that were given
            before, so every later snapshot names those that still run.
    """

    def __init__(self, connection: DatabaseConnection, database: DatabaseSettings, key_scope: KeyScope) -> None:
        self.host = Host(connection.info.host, connection.info.port)
        self.lanes = HeldLanes()
        self.schema = database.schema_name
        self._names = ROLES_APART if key_scope is KeyScope.ROLE else ROLES_ALIKE
        self.nodes_channel = nodes_channel(self.schema)
        self.wake = asyncio.Event()
        self.nodes_changed = asyncio.Event()
        self._routes_changed: Callable[[], None] = lambda: None
        self.answered_at = time.monotonic()
        self.written_at = 0.0
        self._connection = connection
        self._command_timeout = database.command_timeout
        self.ended_by: psycopg.Error | None = None
        self._is_unreplicated = False
        self._lock = asyncio.Lock()
        self._doorbell_held = self._doorbell_heard = False
        self._resting = False
        self._wanted = 0
        self._loop = asyncio.get_running_loop()
        connection.add_notify_handler(lambda notify: self._hear(notify.channel, notify.pid, notify.payload))
        connection.add_notice_handler(self._heed)

    @classmethod
    async def open(
        cls, database: DatabaseSettings, *, last: Host | None = None, key_scope: KeyScope = KeyScope.ALL
    ) -> Self:
        """Connect, without a lane yet.

        Args:
            last: the host to try after all others: the host of the lost session. It may be an old primary that lives on
                next to the new one. Such a server accepts the session, but commits nothing.
        Raises:
            DatabaseUnavailableError: no host accepts the session.
            ConfigurationError: the host is a pooler that keeps no session.
            SchemaError: the outbox tables are missing or too old.
        """
        # A standby may show commits in another order than the primary made them, and cannot be marked on.
        primary: dict[str, Any] = {"application_name": "outbox-relay", "target_session_attrs": "read-write"}
        connection = await connect_async(database, last=last, is_lent=True, **primary)
        try:
            await prepare(connection, database)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, database, key_scope)

    def _heed(self, notice: psycopg.errors.Diagnostic) -> None:
        # The server's last message. libpq takes it for a notice when it comes with the answer to a statement.
        if notice.severity_nonlocalized == "FATAL" and notice.sqlstate:
            self.ended_by = psycopg.errors.lookup(notice.sqlstate)(notice.message_primary or "")
        self._is_unreplicated |= is_unreplicated(notice)

    def _hear(self, channel: str, pid: int, payload: str) -> None:
        if channel != self.nodes_channel:
            self.wake.set()
        elif payload == ROUTES_CHANGED:
            self._routes_changed()
        elif pid != self.pid:
            self.nodes_changed.set()

    def _stir(self) -> None:
        """Wake the tail, as something has come on the socket; its next statement reads it."""
        self.wake.set()
        if not self.lanes.held:  # then the tail runs no statement
            self.nodes_changed.set()

    def on_routes_changed(self, call: Callable[[], None]) -> None:
        """Call this whenever an operator has changed a route in quarantine."""
        self._routes_changed = call

    def unplug(self) -> None:
        """End the session at once. Every statement on it fails as on a lost connection."""
        unplug(self._connection)

    @property
    def pid(self) -> int:
        """The server process."""
        return self._connection.info.backend_pid

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answered_at = -inf
        await self._connection.close()

    def sql(self, statement: SQL, **names: Any) -> bytes:
        """Return a statement with the names filled in.

        Known are the schema, `GIVEN`, the name of the park lock, and what `key_scope` says of roles.

        As bytes, the driver parses the placeholders of a statement once and not each time.
        """
        schema, park = Identifier(self.schema), Literal(f"{self.schema}.park")
        known = {"schema": schema, "given": GIVEN.format(schema=schema), "park": park, **self._names}
        return statement.format(**known, **names).as_bytes()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[AsyncConnection]:
        """Use the connection exclusively, for statements that answer within the command time-out.

        Raises:
            DeadlineError: a statement did not answer in time; the session cannot be used any more.
            CommitUnknownError: a failover may undo the commit; the table must be read again.
            psycopg.OperationalError: the session is lost.
        """
        async with self._alone():
            started = time.monotonic()
            try:
                async with asyncio.timeout(self._command_timeout):
                    yield self._connection
            except TimeoutError:
                raise DeadlineError("a statement of the relay", self._command_timeout) from None
            finally:
                if not self._connection.closed:
                    self.answered_at = started
            if self._is_unreplicated:
                raise CommitUnknownError

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self._wanted += 1
        if self._resting:
            self.wake.set()
        try:
            await self._lock.acquire()
        finally:
            self._wanted -= 1
        try:
            yield
        finally:
            self._lock.release()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """`use` the connection for one statement or transaction that changes some row, and note when it began.

        Do not use it for a statement that may change no row: PostgreSQL gives that no transaction id.
        """
        started = time.monotonic()
        async with self.use() as connection:
            yield connection
        self.note_written(started)

    def note_written(self, began: float) -> None:
        """Note that a statement that began at that moment (monotonic) has changed some row."""
        self.written_at = began

    def has_answered_within(self, seconds: float) -> bool:
        """Whether the session is open, and a statement that was answered began within so many seconds.

        At that moment the session held its locks. The publisher calls this for each batch.
        """
        return time.monotonic() - self.answered_at < seconds

    async def rest(self, seconds: float, *, listen: bool) -> None:
        """Sleep until a notification comes (if `listen`), the session is wanted, or the time is over.

        To wait for the doorbell, read once while the doorbell lock is held, and then rest. A writer that committed
        before the lock was held did not ring.
        """
        # No other task waits for the socket meanwhile: `use` ends the rest before it takes the lock, held here.
        async with self._lock:
            if self._wanted:  # since before we had the lock
                return
            socket = self._connection.fileno()
            self._resting = True
            if listen:
                self._loop.add_reader(socket, self._stir)
            try:
                await wait_for_event(self.wake, seconds)
            finally:
                self._resting = False
                if listen:
                    self._loop.remove_reader(socket)

    async def hold_doorbell(self, *, hold: bool) -> bool:
        """Ask writers to ring from now on, or to stop ringing; return whether that was a change."""
        if hold is self._doorbell_held:
            return False
        doorbell = f"{self.schema}.doorbell"
        async with self.use() as connection:
            if hold and not self._doorbell_heard:
                await connection.execute(SQL("LISTEN {}").format(Identifier(doorbell)))
                self._doorbell_heard = True
            statement = TAKE_DOORBELL if hold else LEAVE_DOORBELL
            await connection.execute(statement.format(doorbell=Literal(doorbell)))
        self._doorbell_held = hold
        return True

    async def leave_doorbell(self) -> None:
        """Stop listening to the doorbell, as there is no lane to read."""
        await self.hold_doorbell(hold=False)
        if self._doorbell_heard:
            async with self.use() as connection:
                await connection.execute(SQL("UNLISTEN {}").format(Identifier(f"{self.schema}.doorbell")))
            self._doorbell_heard = False

    async def take_park_lock(self, connection: AsyncConnection) -> None:
        """Keep all other sessions from parking, retrying and discarding until the end of this transaction."""
        await connection.execute(self.sql(PARK_LOCK))

    async def halve_timeout(self, connection: AsyncConnection) -> None:
        """Make the server end a statement of this transaction before the command time-out ends the session."""
        await connection.execute(HALF_TIMEOUT, {"timeout": f"{max(1, round(self._command_timeout * 500))}ms"})

    def cursor(self) -> AsyncCursor[Any]:
        """Return a cursor for results in binary form."""
        return self._connection.cursor(binary=True)


def array_text(numbers: Iterable[int]) -> str:
    """Return an array as PostgreSQL reads it. The driver's own dumper takes four times as long."""
    return "{" + ",".join(map(str, numbers)) + "}"


def places(rows: Collection[Row]) -> dict[str, str]:
    """Return the parameters of `GIVEN`."""
    return {"lanes": array_text(row.lane for row in rows), "ids": array_text(row.id for row in rows)}


Asked = ParamSpec("Asked")
Result = TypeVar("Result")


class Retry(Protocol):
    """What `retried` needs: the pause between two attempts of a statement."""

    async def wait(self, error: psycopg.Error, attempts: int) -> None:
        """Return when a statement that has failed so many times may run again; raise the error if it may not."""

    async def report(self, error: psycopg.Error, *, again: bool) -> None:
        """Log why a statement has failed, and show it in the health report; `again`: it has failed before."""

    def heal(self) -> None:
        """Note that a statement has succeeded after it had failed."""


def retried(
    ask: Callable[Concatenate[Any, Asked], Awaitable[Result]],
) -> Callable[Concatenate[Any, Asked], Coroutine[Any, Any, Result]]:
    """Repeat a method until it succeeds, with pauses by its object's `_retry`, which raises what must not be repeated.

    The method is one transaction and changes nothing else.
    """

    @wraps(ask)
    async def run(self: Any, /, *args: Asked.args, **kwargs: Asked.kwargs) -> Result:
        attempts = 0
        while True:
            try:
                result = await ask(self, *args, **kwargs)
            except psycopg.Error as error:
                attempts += 1
                retry: Retry = self._retry
                await retry.wait(error, attempts)
            else:
                if attempts:
                    self._retry.heal()
                return result

    return run
