"""Move pending rows into another partition; while a lock prevents that, leave them pending and go on without them.

A session that locks the partition (a migration, `CREATE INDEX`) must not keep other rows from being read, sent and
marked. So a statement waits for such a lock only for a moment. Then its rows are put back: they stay pending, and their
keys wait. When the pause is over, the relay reads them again, and the next statement tries.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import psycopg
from psycopg import AsyncConnection

from relay.engine.read.tail import Tail
from relay.engine.row import Row
from relay.engine.session.session import LaneSession, Retry
from relay.runtime.backoff import backoff
from relay.servers.postgres.statement_fault import StatementFault, fault_of

LOCK_WAIT = "200ms"  # each wait for the lock delays the marks of other rows
PAUSE_INITIAL, PAUSE_MAX = 0.1, 2.0  # seconds between two statements that meet the lock
HEALED_AFTER = 2.0  # seconds after a pause; by then the rows have come back, if they still exist

LIMIT_LOCK_WAIT = "SELECT set_config('lock_timeout', %(wait)s, true)"


class ClosedError(Exception):
    """The partition takes no rows for now; the caller puts its rows back."""


class PutAway:
    """The way of pending rows into one partition."""

    def __init__(self, session: LaneSession, tail: Tail, retry: Retry) -> None:
        self._session = session
        self._tail = tail
        self._retry = retry
        self._failures = 0
        self._opens_at = 0.0  # time.monotonic(); no statement is tried before
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Report that the database works again when no statement fails any more, until cancelled.

        A statement that succeeds reports that itself. But the rows may be gone; then no statement is tried.
        """
        while True:
            await self._closed.wait()
            self._closed.clear()
            await asyncio.sleep(self._opens_at + HEALED_AFTER - time.monotonic())
            if not self._closed.is_set():
                self._open()

    @asynccontextmanager
    async def transaction(self, *, may_split: bool = False) -> AsyncIterator[AsyncConnection]:
        """Use the session for a transaction that waits for a lock only for a moment.

        Args:
            may_split: the caller tries fewer rows at once when a statement times out, and gets that error.
        Raises:
            ClosedError: the partition takes no rows for now. Nothing was changed.
            psycopg.Error: the fault does not pass by itself. The caller's `retried` decides what follows.
        """
        if time.monotonic() < self._opens_at:
            raise ClosedError
        try:
            async with self._session.use() as connection, connection.transaction():
                await connection.execute(LIMIT_LOCK_WAIT, {"wait": LOCK_WAIT})
                yield connection
        except psycopg.Error as error:
            if fault_of(error) is not StatementFault.PASSING:
                raise
            if may_split and isinstance(error, psycopg.errors.QueryCanceled):
                raise
            self._failures += 1
            self._opens_at = time.monotonic() + backoff(self._failures, PAUSE_INITIAL, PAUSE_MAX)
            self._closed.set()
            await self._retry.report(error, again=self._failures > 1)
            raise ClosedError from error
        self._open()

    def put_back(self, rows: Collection[Row]) -> None:
        """Leave rows to the table until the pause is over."""
        self._tail.put_back(rows, self._opens_at)

    def _open(self) -> None:
        if self._failures:
            self._failures, self._opens_at = 0, 0.0
            self._retry.heal()
