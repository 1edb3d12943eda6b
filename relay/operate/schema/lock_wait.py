"""Bounded waits for the locks of a migration.

A statement that waits for ACCESS EXCLUSIVE makes every later reader and writer of its table wait behind it. So a
migration waits for a moment only, gives way, and tries again.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Self

import psycopg
import sqlalchemy as sa
from psycopg import errors

from relay.config.settings import DatabaseSettings
from relay.errors import BusyError, DatabaseUnavailableError
from relay.runtime.backoff import backoff
from relay.servers.postgres.database import connect, one_line
from relay.servers.postgres.pooler import BACKEND

REST_INITIAL, REST_MAX = 0.5, 8.0  # seconds in which writers go on, between two tries
HOLDERS_LOOK = 0.1  # seconds

REFUSED = (errors.LockNotAvailable, errors.DeadlockDetected)
SET_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %s, false)"

# A prepared transaction has the process id 0. Times of other roles' sessions are null without pg_read_all_stats.
HOLDERS = """
    SELECT blocker,
           (SELECT coalesce(relation::regclass::text, 'the lock of another relay migrate')
            FROM pg_locks WHERE pid = %(pid)s AND NOT granted LIMIT 1),
           usename, nullif(application_name, ''), state,
           extract(epoch FROM clock_timestamp() - xact_start)::float8
    FROM unnest(pg_blocking_pids(%(pid)s)) AS blocker
    LEFT JOIN pg_stat_activity ON pid = blocker
    ORDER BY xact_start, blocker
"""

# PostgreSQL bounds the wait for each lock, and a statement may ask for one on each partition.
WAITED = """
    SELECT waitstart, extract(epoch FROM clock_timestamp() - waitstart)::float8
    FROM pg_locks WHERE pid = %(pid)s AND NOT granted AND waitstart IS NOT NULL
"""
GIVE_WAY = "SELECT pg_cancel_backend(%(pid)s)"


# Longer than deadlock_timeout (1 s): only after that does PostgreSQL end an autovacuum that is in the way. Shorter than
# the 3 s for which a relay waits before it reports a lock (relay/engine/session/session.py).
LOCK_TIMEOUT = 2.0  # seconds
WAIT = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class LockLimits:
    """How long a migration waits."""

    lock_timeout: float = LOCK_TIMEOUT  # for the locks of one try, in all; writers wait behind them
    wait: float = WAIT  # for the locks of one version, in all


@dataclass(frozen=True, slots=True)
class _Holder:
    """A session, as last seen, that held a lock that we waited for."""

    pid: int
    lock: str | None
    role: str | None
    application: str | None
    state: str | None
    age: float | None

    def __str__(self) -> str:
        if not self.pid:
            return "a prepared transaction (see pg_prepared_xacts)"
        application = f" ({self.application})" if self.application else ""
        state = f", {self.state}" if self.state else ""
        age = f", its transaction open for {self.age:.0f} s" if self.age is not None else ""
        return f"session {self.pid} of role {self.role}{application}{state}{age}"


class LockWait:
    """Repeats work on one session until it has got its locks, and names who keeps them from it.

    A second session looks from a thread: when a statement has failed, PostgreSQL no longer shows what it waited for. It
    also ends a try whose waits come to `limits.lock_timeout` together; without it, that bounds each wait alone.

    Args:
        tell: is given a line for each try that failed.
    """

    def __init__(
        self,
        database: DatabaseSettings,
        connection: sa.Connection,
        limits: LockLimits,
        tell: Callable[[str], object],
    ) -> None:
        self._connection = connection
        self._pid = connection.scalar(sa.text(BACKEND))
        self._limits = limits
        self._tell = tell
        self._database = database
        self._holders: list[_Holder] = []
        self._waits: dict[datetime, float] = {}  # seconds of each wait of this try, by its begin
        self._gave_way = False  # this try
        self._looking = threading.Lock()  # a look begins and ends within one try: its cancel would hit the next
        self._unseen = ""  # why the holders are not known
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="locks", daemon=True)

    def __enter__(self) -> Self:
        self._connection.exec_driver_sql(SET_LOCK_TIMEOUT, (f"{round(self._limits.lock_timeout * 1000)}ms",))
        self._connection.commit()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def run(self, work: Callable[[], object], what: str, *, rest: float = REST_MAX) -> None:
        """Run `work`, which is one transaction, as often as it takes.

        Args:
            what: is said of it: "version 0003".
            rest: seconds at most between two tries.
        Raises:
            BusyError: not within `limits.wait`; nothing of the work was done.
        """
        give_up_at, tries = time.monotonic() + self._limits.wait, 0
        while True:
            with self._looking:
                self._holders, self._waits, self._gave_way = [], {}, False
            try:
                work()
            except sa.exc.DBAPIError as error:
                refused = (*REFUSED, errors.QueryCanceled) if self._gave_way else REFUSED
                if not isinstance(error.orig, refused):
                    raise
                self._connection.rollback()
                reason = self._reason(error.orig)
            else:
                return
            tries += 1
            pause = min(rest, backoff(tries, REST_INITIAL, REST_MAX))
            if time.monotonic() + pause > give_up_at:
                raise BusyError(
                    f"{what} was not done, and nothing of it is left, after {self._limits.wait:g} s of tries: {reason};"
                    f" {self._remedy()}"
                )
            self._tell(f"{what} waits: {reason}")
            time.sleep(pause)

    def _reason(self, error: psycopg.Error) -> str:
        if not self._holders:
            return self._unseen or one_line(error)
        locks = {holder.lock for holder in self._holders if holder.lock}
        return f"{', '.join(sorted(locks)) or 'a lock'} is held by {'; '.join(map(str, self._holders))}"

    def _remedy(self) -> str:
        ends = [f"SELECT pg_terminate_backend({holder.pid})" for holder in self._holders if holder.pid]
        by_force = f" (by force: {'; '.join(ends)})" if ends else ""
        return f"let that transaction end{by_force}, or give it longer with --wait"

    def _look(self) -> None:
        try:
            with connect(self._database, application_name="outbox-relay migrate, looking for locks") as connection:
                while not self._over.wait(HOLDERS_LOOK):
                    with self._looking:
                        found = [_Holder(*row) for row in connection.execute(HOLDERS, {"pid": self._pid})]
                        if found:
                            self._holders = found
                            self._bound(connection)
        # The migration goes on: it only cannot say who is in its way. The role may have no second connection.
        except (psycopg.Error, DatabaseUnavailableError) as error:
            self._unseen = f"a lock is held, and the session that looks for its holder failed: {one_line(error)}"

    def _bound(self, connection: psycopg.Connection) -> None:
        waits, pid = self._waits, {"pid": self._pid}
        waits.update(connection.execute(WAITED, pid).fetchall())
        # A single wait ends by itself.
        if len(waits) > 1 and sum(waits.values()) > self._limits.lock_timeout:
            waits.clear()
            self._gave_way = True
            connection.execute(GIVE_WAY, pid)
