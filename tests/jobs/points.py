"""Let something happen at the n-th statement of a job: a death, a lost session, a pause, a cancel."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import psycopg

from relay.errors import UsageError
from relay.jobs.job import cancel_job, pause_job
from relay.servers.postgres.database import DatabaseConnection, unplug
from relay.servers.postgres.tables import Tables

PATIENCE = 0.3  # seconds for a pause, which may have to wait for the transaction of the job


class Killed(BaseException):
    """The process is dead, as far as the job can tell."""


class What(StrEnum):
    """What happens."""

    KILLED = "killed"
    LOST = "lost"
    PAUSED = "paused"
    CANCELLED = "cancelled"


class Points:
    """The statements of one run.

    Attributes:
        passed: how many there were.
        has_happened: whether the run came to the point.
        has_turned: whether the job was paused or cancelled in time.
    """

    def __init__(self, url: str, job: int, what: What, *, at: int, behind: bool) -> None:
        self.passed = 0
        self.has_happened = self.has_turned = False
        self._url = url
        self._job = job
        self._what = what
        self._at = at
        self._behind = behind
        self._turning: asyncio.Task[None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the statements of this process's jobs."""
        execute = psycopg.AsyncCursor.execute
        points = self

        async def watched(cursor: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(cursor.connection, DatabaseConnection):
                return await execute(cursor, *arguments, **options)
            points.passed += 1
            is_it = points.passed == points._at
            if is_it and not points._behind:
                await points._happen(cursor.connection)
            if points.has_happened and points._what is What.KILLED:
                raise Killed
            answer = await execute(cursor, *arguments, **options)
            if is_it and points._behind:
                await points._happen(cursor.connection)
            return answer

        with patch.object(psycopg.AsyncCursor, "execute", watched):
            yield

    async def settled(self) -> None:
        """Return once the pause or the cancel is written down."""
        if self._turning is not None:
            await self._turning

    async def _happen(self, connection: psycopg.AsyncConnection) -> None:
        self.has_happened = True
        match self._what:
            case What.KILLED:
                unplug(connection)
                raise Killed
            case What.LOST:
                unplug(connection)
            case What.PAUSED | What.CANCELLED:
                self._turning = asyncio.create_task(asyncio.to_thread(self._turn))
                await asyncio.wait([self._turning], timeout=PATIENCE)

    def _turn(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            turn = pause_job if self._what is What.PAUSED else cancel_job
            with suppress(UsageError):  # it has ended
                turn(Tables(connection, "outbox"), self._job, by="ada", why="a test")
                self.has_turned = True
