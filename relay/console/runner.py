"""Run the jobs that requests have ordered: those over rows one after the other, and so those over letters, and replays.

A job is a row of the table `job`, and a batch of its rows is one transaction. So a console that is killed leaves it
where it was, and the next look of any console goes on with it. What passes by itself, such as a lost connection, is
over at a later look. Whatever else ends a job, foreseen or not, pauses that job with its reason, and the others go on.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import psycopg
from psycopg.sql import SQL

from relay.config.settings import Settings
from relay.errors import BusyError, DeadlineError, JobTurnedError, OutboxError, PartlyDoneError, UnavailableError
from relay.jobs.job import Job, Source, pause_itself, read_job
from relay.jobs.runner import Run
from relay.logger import get_logger
from relay.operate.bulk import run_of, work_of
from relay.operate.session import session
from relay.runtime.backoff import wait_for_event
from relay.servers.postgres.database import one_line
from relay.servers.postgres.statement_fault import StatementFault, fault_of
from relay.servers.postgres.tables import Tables

log = get_logger(__name__)

LOOK_INTERVAL = 5.0  # seconds between two looks for jobs that another console has left
KINDS = {  # of jobs, that run at the same time
    "jobs": (Source.PARKED, Source.ARCHIVED, Source.DISCARDED, Source.QUARANTINED),
    "letters": (Source.DEAD_LETTER,),
    "replays": (Source.SENT,),
}
Result = TypeVar("Result")

WAITING = SQL("""
    SELECT id FROM {schema}.job WHERE by_console AND state = 'open' AND source = ANY (%(sources)s) ORDER BY id
""")


class Runner:
    """Runs jobs over rows, over letters and replays at the same time, and those of a kind one after the other.

    Args:
        note: called with an error that nobody has foreseen, and that ended a look for jobs.
        left: called with each job that has run, in the loop: it has ended, or is paused.
    """

    def __init__(
        self, settings: Settings, note: Callable[[Exception], None], left: Callable[[Job], None] = lambda _: None
    ) -> None:
        self._settings = settings
        self._note = note
        self._left = left
        self._wanted = {kind: asyncio.Event() for kind in KINDS}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._runs: set[Run] = set()

    def wake(self) -> None:
        """Look for jobs at once; any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set)

    async def run(self) -> None:
        """Run what there is to run, until `stop`."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for kind, wanted in self._wanted.items():
                tasks.create_task(self._keep(wanted, KINDS[kind]), name=kind)

    def stop(self) -> None:
        """End `run`; a job that it works on is left after its last whole batch."""
        self._stopping.set()
        self._set()
        for run in self._runs:
            run.stop()

    def _set(self) -> None:
        for each in self._wanted.values():
            each.set()

    async def _keep(self, wanted: asyncio.Event, sources: Sequence[Source]) -> None:
        while not self._stopping.is_set():
            wanted.clear()
            try:
                await self._run_all(sources)
            except OutboxError as error:
                if not self._stopping.is_set():
                    log.warning("console.jobs_wait", error=str(error))
            except Exception as error:
                self._note(error)
            await wait_for_event(wanted, LOOK_INTERVAL)

    async def _run_all(self, sources: Sequence[Source]) -> None:
        for job in await asyncio.to_thread(self._in_session, partial(self._waiting, sources=sources)):
            if self._stopping.is_set():
                return
            read = partial(read_job, job=job)
            found = None
            try:
                found = await asyncio.to_thread(self._in_session, read)
                run = run_of(self._settings, found, work_of(self._settings, found))
                self._runs.add(run)
                if self._stopping.is_set():
                    run.stop()
                try:
                    self._tell(await run.run())
                finally:
                    self._runs.discard(run)
            except Exception as error:  # the next job may go well
                pause = partial(self._pause, job=job, because=self._reason_to_pause(job, error))
                await asyncio.to_thread(self._in_session, pause)
            finally:
                if found is not None:
                    self._left(found)

    def _in_session(self, work: Callable[[Tables], Result]) -> Result:
        with session(self._settings.database) as tables:
            return work(tables)

    def _waiting(self, tables: Tables, sources: Sequence[Source]) -> list[int]:
        return [id_ for (id_,) in tables.execute(WAITING, {"sources": list(sources)})]

    def _reason_to_pause(self, job: int, error: Exception) -> str | None:
        """Return why a job cannot go on without an operator; None if others run it, or have turned it.

        Raises:
            Exception: the error itself, when it is over at a later look.
        """
        cause = error.__cause__ if isinstance(error, PartlyDoneError) and error.__cause__ else error
        if isinstance(cause.__cause__, psycopg.Error) and cause.__cause__.sqlstate:
            cause = cause.__cause__  # in the database's words, which tell more kinds apart
        if self._stopping.is_set() or passes(cause):
            raise error
        if isinstance(cause, BusyError | JobTurnedError):
            return None
        log.error("console.job_failed", job=job, exc_info=error)
        return in_words(error)

    def _pause(self, tables: Tables, job: int, because: str | None) -> None:
        if because is not None:
            pause_itself(tables, job, because=because)

    def _tell(self, job: Job) -> None:
        figures = {"done": job.done, "failed": job.failed}
        log.info("console.job_ended", job=job.id, kind=str(job.kind), state=job.state, **figures)


def passes(error: BaseException) -> bool:
    """Whether a later look may find the cause gone."""
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return fault_of(error) in (StatementFault.SESSION, StatementFault.PASSING)
    return isinstance(error, UnavailableError | DeadlineError)


def in_words(error: Exception) -> str:
    """Return why a job is paused."""
    if isinstance(error, OutboxError | psycopg.Error):
        return one_line(error)
    return f"a fault of the console: see its log ({type(error).__name__}: {one_line(error)})"
