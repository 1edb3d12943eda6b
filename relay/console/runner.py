"""Run the jobs that requests have ordered: those over rows one after the other, and so those over letters, and replays.

A job is a row of the table `job`, and a batch of its rows is one transaction. So a console that is killed leaves it
where it was, and the next look of any console goes on with it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import psycopg
from psycopg.sql import SQL, Identifier

from relay.backoff import wait_for_event
from relay.config.settings import Settings
from relay.database import one_line, unplug
from relay.errors import BusyError, DeadlineError, JobTurnedError, OutboxError, PartlyDoneError, UnavailableError
from relay.jobs.job import Job, Source, read_job
from relay.logger import get_logger
from relay.operate.dead_letters.change import Command, Done
from relay.operate.dead_letters.job import pause_letters, run_letters
from relay.operate.release import run_rows
from relay.operate.session import session
from relay.replay.run import Replay
from relay.replay.serve import run_in_words

log = get_logger(__name__)

LOOK_INTERVAL = 5.0  # seconds between two looks for jobs that another console has left
STATEMENT_TIMEOUT = 600.0  # seconds: one head may have a million rows behind it
ROWS = (Source.PARKED, Source.ARCHIVED, Source.QUARANTINED)
LETTERS = (Source.DEAD_LETTER,)
REPLAYS = (Source.SENT,)
# The next look may find it gone.
PASSING = (UnavailableError, DeadlineError, psycopg.OperationalError, psycopg.InterfaceError)

WAITING = SQL("""
    SELECT id FROM {schema}.job WHERE by_console AND state = 'open' AND source = ANY (%(sources)s) ORDER BY id
""")


class Runner:
    """Runs jobs over rows and over letters in a thread each, on separate connections, and replays in the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wanted = (asyncio.Event(), asyncio.Event(), asyncio.Event())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._connection: psycopg.Connection | None = None
        self._letters: Command | None = None
        self._replay: Replay | None = None

    def wake(self) -> None:
        """Look for jobs at once; any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set)

    async def run(self) -> None:
        """Run what there is to run, until `stop`."""
        self._loop = asyncio.get_running_loop()
        rows, letters, replays = self._wanted
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep(rows, lambda: asyncio.to_thread(self._run_rows)), name="jobs")
            tasks.create_task(self._keep(letters, lambda: asyncio.to_thread(self._run_letters)), name="letters")
            tasks.create_task(self._keep(replays, self._run_replays), name="replays")

    def stop(self) -> None:
        """End `run`; a job that it works on is left after its last whole batch."""
        self._stopping.set()
        self._set()
        if self._replay is not None:
            self._replay.stop()
        if self._letters is not None:
            self._letters.stop()
        if self._connection is not None:
            unplug(self._connection)

    def _set(self) -> None:
        for each in self._wanted:
            each.set()

    async def _keep(self, wanted: asyncio.Event, run: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            wanted.clear()
            try:
                await run()
            except OutboxError as error:
                if not self._stopping.is_set():
                    log.warning("console.jobs_wait", error=str(error))
            await wait_for_event(wanted, LOOK_INTERVAL)

    def _run_rows(self) -> None:
        database = self._settings.database
        try:
            with session(database, timeout=STATEMENT_TIMEOUT) as connection:
                self._connection = connection
                for job in self._waiting(connection, ROWS):
                    if self._stopping.is_set():
                        return
                    try:
                        self._tell(run_rows(connection, database.schema_name, job))
                    except BusyError:
                        continue  # another console runs it
        finally:
            self._connection = None

    def _run_letters(self) -> None:
        schema = self._settings.database.schema_name
        with session(self._settings.database, timeout=STATEMENT_TIMEOUT) as connection:
            for job in self._waiting(connection, LETTERS):
                if self._stopping.is_set():
                    return
                because = self._run_letters_job(connection, job)
                if because is not None:
                    pause_letters(connection, schema, job, because=because)
                if (left := read_job(connection, schema, job.id)).state != "running":  # by another console
                    self._tell(left)

    def _run_letters_job(self, connection: psycopg.Connection, job: Job) -> str | None:
        """Do a job; return why it cannot go on without an operator. What it raises is over at a later look."""
        settings = self._settings
        try:
            asyncio.run(
                run_letters(
                    connection, settings.database.schema_name, settings.broker, job, run=self._run_letters_command
                )
            )
        except (OutboxError, psycopg.Error) as error:
            cause = error.__cause__ if isinstance(error, PartlyDoneError) and error.__cause__ else error
            if isinstance(cause, PASSING):
                raise
            if isinstance(cause, JobTurnedError):  # and perhaps let go on since
                return None
            is_elsewhere = read_job(connection, settings.database.schema_name, job.id).state == "running"
            return None if is_elsewhere else one_line(error)
        return None

    async def _run_letters_command(self, command: Command) -> Done:
        self._letters = command
        try:
            if self._stopping.is_set():
                command.stop()
            return await command.run()
        finally:
            self._letters = None

    async def _run_replays(self) -> None:
        for job in await asyncio.to_thread(self._waiting_replays):
            if self._stopping.is_set():
                return
            self._replay = Replay(self._settings, job, rate=None)
            try:
                await run_in_words(self._replay)
            except BusyError:
                continue
            finally:
                self._replay = None
            self._tell(await asyncio.to_thread(self._read, job.id))

    def _waiting_replays(self) -> list[Job]:
        with session(self._settings.database) as connection:
            return self._waiting(connection, REPLAYS)

    def _waiting(self, connection: psycopg.Connection, sources: tuple[Source, ...]) -> list[Job]:
        schema = self._settings.database.schema_name
        statement = WAITING.format(schema=Identifier(schema))
        found = connection.execute(statement, {"sources": list(sources)}).fetchall()
        return [job for (id_,) in found if (job := read_job(connection, schema, id_)).state == "interrupted"]

    def _read(self, job: int) -> Job:
        with session(self._settings.database) as connection:
            return read_job(connection, self._settings.database.schema_name, job)

    def _tell(self, job: Job) -> None:
        figures = {"done": job.done, "failed": job.failed}
        log.info("console.job_ended", job=job.id, kind=str(job.kind), state=job.state, **figures)
