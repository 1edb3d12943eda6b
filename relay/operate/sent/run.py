"""Run a replay job: read, send, wait for the confirms, save how far.

list ──places──> read ──rows──> publisher ──frames──> broker        (a connection and a channel of its own)
                                   │ <──confirms────────┘
             save <── ledger <─────┘ settled rows

The publisher is the relay's own, in order per key: nothing of a key is sent before its predecessor is settled.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from enum import Enum, auto
from math import inf
from typing import NamedTuple, TypeVar

import psycopg

from relay.config.settings import KeyPolicy, Ordering, Settings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.positions import READ_SHARE
from relay.engine.row import Row
from relay.engine.send.broker_link import BrokerLink
from relay.engine.send.message import REPLAY_ID, REPLAYED_AT
from relay.engine.send.sender import Sender
from relay.errors import DatabaseUnavailableError, DeadlineError, PartlyDoneError
from relay.jobs.job import Job
from relay.logger import get_logger
from relay.operate.sent.ledger import Ledger
from relay.operate.sent.pace import Pace
from relay.operate.sent.session import ReplaySession, Saved
from relay.runtime.backoff import Stopping, backoff, unless_stopping, wait_for_event
from relay.runtime.health import Health
from relay.runtime.stopping import GOODBYE

log = get_logger(__name__)

SAVE_INTERVAL = 0.3  # seconds
LOOK_INTERVAL = 0.1  # seconds between two looks at the live rows
RECONNECT_INITIAL, RECONNECT_MAX = 0.1, 5.0  # seconds
WINDOW_ROWS = 4000  # above the saved position; so many at most are sent twice after a kill
ROWS_PER_READ = 1000
MOST_FAILURES = 1000  # of one run: what refuses so many refuses all

Answer = TypeVar("Answer")


class Progress(NamedTuple):
    """How far a job is, over all its runs."""

    selected: int | None
    done: int
    failed: int


class RunEnd(Enum):
    """How a run of a job ended."""

    DONE = auto()
    STOPPED = auto()  # before the end of the job, which can be resumed
    PAUSED = auto()  # too many rows of a stage failed


STATES = {RunEnd.DONE: "done", RunEnd.STOPPED: "open", RunEnd.PAUSED: "paused"}  # as the table has them


class Replay:
    """One run of a job.

    Attributes:
        drain: set by `stop`: what is in flight is settled and saved, and the job can be resumed.
    """

    def __init__(
        self, settings: Settings, job: Job, *, rate: float | None, show: Callable[[Progress], None] = lambda _: None
    ) -> None:
        relay = settings.relay
        self._settings = settings.model_copy(
            update={
                "relay": relay.model_copy(update={"node": f"replay {job.id}, {relay.node}"}),
                "broker": settings.broker.model_copy(update={"declare": False}),
            }
        )
        self._job = job
        self._show = show
        self._health = Health()
        self._publisher = Sender(DeliveryPolicy.of(Ordering.KEY, KeyPolicy.SKIP), relay.max_in_flight)
        stamp: dict[str, str | int] = {REPLAY_ID: job.id, REPLAYED_AT: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        self._link = BrokerLink(self._settings, self._publisher, self._health, stamp)
        self._ledger = Ledger(job.position)
        self._pace = Pace(job.rate if rate is None else rate)
        self._stage = job.stage
        self._stage_failed = 0  # rows of the stage, of this run
        self._paused_because: str | None = None
        self._selected = job.selected
        self._refused = 0  # rows of this run
        self._reason = ""  # of the last one
        self._session: ReplaySession | None = None
        self._was_connected = False
        self._database = asyncio.Lock()
        self._changed = asyncio.Event()  # rows were settled, or we are to stop
        self._ended = asyncio.Event()
        self._stop_at = inf  # by then what is in flight must be settled
        self._whole: asyncio.Timeout | None = None
        self.drain = asyncio.Event()

    @property
    def progress(self) -> Progress:
        job, ledger = self._job, self._ledger
        return Progress(self._selected, job.done + ledger.replayed, job.failed + ledger.failed)

    async def run(self) -> RunEnd:
        """Send the rest of the job.

        Raises:
            PartlyDoneError: it was cancelled, or too much was refused.
            OutboxError: it cannot begin.
        """
        end = RunEnd.STOPPED
        try:
            async with asyncio.timeout(None) as self._whole:
                if self.drain.is_set():
                    self._whole.reschedule(self._stop_at + GOODBYE)
                end = await self._run()
        except TimeoutError:
            seconds = self._settings.relay.drain_timeout
            log.warning("drain.timed_out", in_flight=self._publisher.in_flight, seconds=seconds)
        finally:
            self._whole = None
            await self._close()
        if self._refused >= MOST_FAILURES:
            raise PartlyDoneError(
                f"replay {self._job.id} stopped: {self._refused} rows were refused, the last with: {self._reason};"
                f" `relay jobs resume {self._job.id}` goes on behind them"
            )
        return end

    def stop(self) -> None:
        """Send no more; `run` returns when what is in flight is settled and saved.

        Whatever it waits for by then, it returns soon after `relay.drain_timeout`.
        """
        if self.drain.is_set():
            return
        self.drain.set()
        self._changed.set()
        self._stop_at = asyncio.get_running_loop().time() + self._settings.relay.drain_timeout
        if self._whole is not None:
            self._whole.reschedule(self._stop_at + GOODBYE)

    async def _run(self) -> RunEnd:
        async with asyncio.TaskGroup() as tasks:
            linking = tasks.create_task(self._link.run(), name="link")
            settling = tasks.create_task(self._settle(), name="settle")
            saving = tasks.create_task(self._save_often(), name="save")
            looking = None if self._pace.is_fixed else tasks.create_task(self._look_often(), name="look")
            end = await self._carry()
            loop = asyncio.get_running_loop()
            stop_at = min(self._stop_at, loop.time() + self._settings.relay.drain_timeout)
            await self._settle_window(stop_at)
            self._publisher.stop()
            await asyncio.wait([settling], timeout=max(0.0, stop_at - loop.time()))
            self._ended.set()
            await asyncio.wait([saving])
            for task in (linking, settling, looking):
                if task is not None:
                    task.cancel()
        await self._save(STATES[end])
        return end

    async def _carry(self) -> RunEnd:
        """List the rows, and send them until they are settled or `stop` is called."""
        try:
            await unless_stopping(self.drain, self._list_and_send())
        except Stopping:
            return RunEnd.STOPPED
        return RunEnd.PAUSED if self._paused_because else RunEnd.DONE

    async def _list_and_send(self) -> None:
        await self._list()  # which may take minutes
        after = self._job.position
        while rows := await self._next_rows(after):
            after = rows[-1].id
            while rows:
                if not (room := await self._room_of_stage()):
                    return
                count = await self._pace.room(min(len(rows), room))
                self._ledger.offer(rows[:count])
                self._publisher.offer(rows[:count])
                rows = rows[count:]
        while self._ledger.rows:
            await self._wait_changed()
        self._end_stage()

    async def _room_of_stage(self) -> int:
        """Return how many rows may go until the stage ends; 0: it has ended with too many failures.

        At the end of a stage it waits until each of its rows is confirmed or refused.
        """
        stages = self._job.stages or []
        while self._stage < len(stages):
            settled = self.progress.done + self.progress.failed
            if (room := stages[self._stage] - settled - self._ledger.rows) > 0:
                return room
            while self._ledger.rows:
                await self._wait_changed()
            self._end_stage()
            if self._paused_because:
                return 0
        return ROWS_PER_READ

    def _end_stage(self) -> None:
        """Count the stage as ended, and note why the job pauses if too many of its rows failed."""
        stages, most = self._job.stages or [], self._job.stop_when_failing
        if self._stage >= len(stages):
            return
        begin = stages[self._stage - 1] if self._stage else 0
        rows, failed = self.progress.done + self.progress.failed - begin, self._stage_failed
        if most is not None and failed > most * max(rows, 1):
            self._paused_because = f"{failed} of {rows} rows of the stage failed, and at most {most:.0%} may"
        self._stage, self._stage_failed = self._stage + 1, 0

    async def _list(self) -> None:
        if not self._pace.is_fixed:
            await self._look()  # so that the time of the list counts when it looks again
        listed = await self._on_database(lambda session: session.list_rows(self._job.position))
        if self._selected is None:
            self._selected = listed
        log.info("replay.listed", replay=self._job.id, rows=listed)

    async def _settle_window(self, stop_at: float) -> None:
        """Told to stop: send what was handed over all the same, for what is settled behind a gap would go out twice."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(stop_at):
                while self._ledger.rows and self._refused < MOST_FAILURES:
                    if not self._publisher.in_flight and not len(self._publisher.queue.checks):
                        break
                    await self._wait_changed()

    async def _next_rows(self, after: int) -> list[Row]:
        """Wait for room in the window, and return the next rows; no rows when these were all."""
        most = self._settings.relay.max_window_bytes
        while self._ledger.rows > WINDOW_ROWS - ROWS_PER_READ or self._ledger.bytes > most * 3 // 4:
            await self._wait_changed()
        size = min(most - self._ledger.bytes, most // READ_SHARE)
        return await self._on_database(lambda session: session.next_rows(after, ROWS_PER_READ, size))

    async def _wait_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _settle(self) -> None:
        while await self._publisher.wait_settled():
            confirmed, faulty = self._publisher.take_settled()
            self._ledger.confirm(confirmed)
            for row, reason, _ in faulty:
                log.warning("replay.row_failed", replay=self._job.id, id=row.id, reason=reason)
                self._ledger.fail(row, reason)
                self._stage_failed += 1
                self._publisher.queue.release_key(row)
                self._refused, self._reason = self._refused + 1, reason
            if self._refused >= MOST_FAILURES:
                self.stop()
            self._changed.set()

    async def _save_often(self) -> None:
        while not self._ended.is_set():
            await self._save("open")
            self._show(self.progress)
            await wait_for_event(self._ended, SAVE_INTERVAL)

    async def _save(self, state: str) -> None:
        failures = list(self._ledger.failures)
        saved = Saved(state, self._stage, self._paused_because, *self.progress, self._ledger.position, failures)
        await self._on_database(lambda session: session.save(saved))
        del self._ledger.failures[: len(failures)]

    async def _look_often(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOOK_INTERVAL)

    async def _look(self) -> None:
        self._pace.see(*await self._on_database(ReplaySession.look))

    async def _on_database(self, call: Callable[[ReplaySession], Awaitable[Answer]]) -> Answer:
        """Use the session; one that was lost is opened again and asked again, while what was read goes out."""
        failures = 0
        async with self._database:
            while True:
                try:
                    if self._session is None:
                        self._session = await ReplaySession.open(self._settings.database, self._job)
                        self._was_connected = True
                        self._health.heal("database")
                    return await call(self._session)
                except (
                    psycopg.OperationalError,
                    psycopg.InterfaceError,
                    DatabaseUnavailableError,
                    DeadlineError,
                ) as error:
                    if self.drain.is_set() or not self._is_lost(error):
                        raise
                    self._health.degrade("database", str(error))
                    await self._close()
                failures += 1
                await asyncio.sleep(backoff(failures, RECONNECT_INITIAL, RECONNECT_MAX))

    def _is_lost(self, error: Exception) -> bool:
        """Return whether a new session may help: there was one before, and the database did not merely refuse."""
        if self._session is None:
            return self._was_connected
        return isinstance(error, DeadlineError) or self._session.is_lost

    async def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
