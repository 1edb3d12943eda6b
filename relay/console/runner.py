"""Run the jobs that requests have ordered, one after the other.

A job is a row of the table `job`, and a batch of its rows is one transaction. So a console that is killed leaves it
where it was, and the next look of any console goes on with it.
"""

import asyncio
import threading

import psycopg
from psycopg.sql import SQL, Identifier

from relay.backoff import wait_for_event
from relay.config.settings import Settings
from relay.database import unplug
from relay.errors import BusyError, OutboxError
from relay.jobs.job import Job, read_job
from relay.logger import get_logger
from relay.operate.release import run_rows
from relay.operate.session import session

log = get_logger(__name__)

LOOK_INTERVAL = 5.0  # seconds between two looks for jobs that another console has left
STATEMENT_TIMEOUT = 600.0  # seconds: one head may have a million rows behind it

WAITING = SQL("SELECT id FROM {schema}.job WHERE by_console AND state = 'open' ORDER BY id")


class Runner:
    """Runs jobs in a thread, on a separate connection, whose statements may take long."""

    def __init__(self, settings: Settings) -> None:
        self._database = settings.database
        self._wanted = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._connection: psycopg.Connection | None = None

    def wake(self) -> None:
        """Look for jobs at once; any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wanted.set)

    async def run(self) -> None:
        """Run what there is to run, until `stop`."""
        self._loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            self._wanted.clear()
            await asyncio.to_thread(self._run_all)
            await wait_for_event(self._wanted, LOOK_INTERVAL)

    def stop(self) -> None:
        """End `run`; a job that it works on is left after its last whole batch."""
        self._stopping.set()
        self._wanted.set()
        if self._connection is not None:
            unplug(self._connection)

    def _run_all(self) -> None:
        try:
            with session(self._database, timeout=STATEMENT_TIMEOUT) as connection:
                self._connection = connection
                for job in self._waiting(connection):
                    if self._stopping.is_set():
                        return
                    self._run(connection, job)
        except OutboxError as error:
            if not self._stopping.is_set():
                log.warning("console.jobs_wait", error=str(error))
        finally:
            self._connection = None

    def _waiting(self, connection: psycopg.Connection) -> list[Job]:
        schema = self._database.schema_name
        found = connection.execute(WAITING.format(schema=Identifier(schema))).fetchall()
        return [job for (id_,) in found if (job := read_job(connection, schema, id_)).state == "interrupted"]

    def _run(self, connection: psycopg.Connection, job: Job) -> None:
        try:
            ended = run_rows(connection, self._database.schema_name, job)
        except BusyError:
            return  # another console runs it
        log.info(
            "console.job_ended", job=job.id, kind=job.kind, state=ended.state, done=ended.done, failed=ended.failed
        )
