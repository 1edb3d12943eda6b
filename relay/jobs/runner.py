"""Run one job in this process: the loop over the steps of its work, whatever the work is.

                    room                    Did: saved by the work, in the transaction that has the rows
    stage, pace ────────────> work.step ──> Waits: sleep
                                            Ended: save the end ────> done
                                            Stuck: save the reason ─> paused
    a full stage ───────────> work.outcome: end the stage ──────────> on, or paused
    all is done ────────────> work.watch: what becomes of the rows ─> done

The job's row is the only place where an operator's pause or cancel arrives: what finds it there saves no more.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import assert_never

import psycopg

from relay.errors import JobTurnedError, OutboxError, PartlyDoneError
from relay.jobs.job import Job, JobState
from relay.jobs.work import NAP, Did, Ended, Save, Stage, StageOutcome, Step, Stuck, Waits, Work, stage_of
from relay.logger import get_logger
from relay.runtime.backoff import Stopping, unless_stopping, wait_for_event
from relay.runtime.stopping import stopped_by_signals
from relay.servers.postgres.database import one_line

log = get_logger(__name__)

CLOSING = 1.0  # seconds beyond the time to drain, to leave the lock and to close
LOOK_INTERVAL = 1.0  # seconds, after which a job that waits looks whether an operator has paused or cancelled it
WATCH = 30.0  # seconds at most that a job looks what becomes of its rows
WATCH_INTERVAL, WATCH_SHARE = 0.5, 5  # seconds between two looks; a look may take this part of the time

Show = Callable[[Job], None]


class Run:
    """One run of a job by this process; `run` it once.

    Args:
        show: called after each step that has done something.
        drain_timeout: seconds that a step may take when `stop` was called.
    """

    def __init__(self, schema: str, job: Job, work: Work, *, drain_timeout: float, show: Show = lambda _: None) -> None:
        self._work = work
        self._show = show
        self._drain_timeout = drain_timeout
        self._save = Save(schema, job)
        self._tried = 0  # of the job; it counts what was refused in this run alone
        self._of_this_run = 0
        self._stopping = asyncio.Event()
        self._whole: asyncio.Timeout | None = None
        self._looked_at = 0.0

    def stop(self) -> None:
        """Begin no more; `run` returns when what is under way is saved, soon after the time to drain at the latest."""
        if not self._stopping.is_set():
            self._stopping.set()
            if self._whole is not None:
                self._end_soon(self._whole)

    async def run(self) -> Job:
        """Do the rest of the job, and return it as it is then.

        Raises:
            BusyError: another process runs it.
            PartlyDoneError: it could not go on after some rows; `relay jobs resume` goes on.
            OutboxError, psycopg.Error: nothing was done.
        """
        try:
            async with asyncio.timeout(None) as self._whole:
                if self._stopping.is_set():
                    self._end_soon(self._whole)
                async with self._work.opened(self._save):
                    ended = await self._carry()
                    # A session that is closed has its locks a little longer, and a resume would be refused.
                    with suppress(psycopg.Error, OutboxError, TimeoutError):
                        async with asyncio.timeout(CLOSING):
                            await self._work.use(self._save.leave_lock)
                    return ended
        except TimeoutError:
            if self._whole is None or not self._whole.expired():
                raise
            log.warning("drain.timed_out", in_flight=self._work.under_way, seconds=self._drain_timeout)
            return self._interrupted()
        except PartlyDoneError:
            raise
        except (psycopg.Error, OutboxError) as error:
            if not self._of_this_run + self._work.doubtful:
                raise
            raise PartlyDoneError(self._how_far(error)) from error
        finally:
            self._whole = None

    async def run_until_told(self) -> Job:
        """Do as `run`, until SIGTERM or SIGINT; a second signal stops at once, and loses nothing."""
        running = asyncio.create_task(self.run(), name=f"job {self._save.job.id}")
        with stopped_by_signals(lambda _: self.stop(), running):
            try:
                return await running
            except asyncio.CancelledError:
                return self._interrupted()

    async def _carry(self) -> Job:
        save, work = self._save, self._work
        self._tried = save.job.tried
        try:
            while save.job.state is JobState.RUNNING:
                if self._stopping.is_set():
                    if (did := await work.settle(save)) is not None:
                        save.job = save.with_news(did)
                    return self._interrupted()
                with suppress(Stopping):
                    await self._go_on()
        except JobTurnedError:
            return await work.use(save.read)
        return save.job

    async def _go_on(self) -> None:
        """Do a step, or look at the outcome of a stage."""
        stage = stage_of(self._save.job)
        left = self._work.most if stage is None else stage.end - self._tried - self._work.under_way
        if stage is not None and left <= 0 and not self._work.under_way:
            await self._end_stage()
            return
        if left > 0:
            room = await self._work.pace.room(min(left, self._work.most))
        else:  # until what is under way tells that the stage is full
            await wait_for_event(self._stopping, NAP)
            room = 0
        if not room and not self._work.under_way:
            await self._look()
            return
        before = self._tried + self._work.under_way
        step = await self._step(room)
        await self._take(step, stage)
        self._work.pace.give_back(room - (self._tried + self._work.under_way - before))

    async def _step(self, room: int) -> Step:
        step = self._work.step(room, self._save)
        return await unless_stopping(self._stopping, step) if self._work.may_be_cut else await step

    async def _take(self, step: Step, stage: Stage | None) -> None:
        match step:
            case Did():
                self._save.job = self._save.with_news(step)
                self._tried += step.done + step.failed + step.refused
                self._of_this_run += step.done + step.failed
                self._show(self._save.job)
            case Waits():
                await self._wait(step.seconds)
            case Stuck():
                await self._write(replace(self._save.job, state=JobState.PAUSED, paused_because=step.because))
            case Ended() if stage is not None and self._tried > stage.begin:
                await self._end_stage()
            case Ended():
                if not await self._has_watched():
                    await self._end(step)
            case _:
                assert_never(step)

    async def _end_stage(self) -> None:
        """End the stage when its outcome is known; it may end in a pause."""
        match await self._work.outcome(self._save):
            case StageOutcome() as outcome:
                self._save.job = self._save.with_news(outcome)
                self._show(self._save.job)
            case Waits() as waits:
                await self._wait(waits.seconds)
            case Stuck() as stuck:
                await self._write(replace(self._save.job, state=JobState.PAUSED, paused_because=stuck.because))

    async def _end(self, step: Ended) -> None:
        job = self._save.job
        selected = job.done + step.failed if job.selected is None else job.selected
        await self._write(replace(job, failed=job.failed + step.failed, selected=selected, state=JobState.DONE))

    async def _has_watched(self) -> bool:
        """Look what becomes of the rows until that is known, for a while; False: nothing can be known, or is to do."""
        clock = asyncio.get_running_loop().time
        until = clock() + WATCH
        while True:
            begun = clock()
            seen = await self._work.watch(self._save, is_last=begun >= until)
            if seen is None:
                return False
            self._save.job = self._save.with_news(seen)
            self._show(self._save.job)
            if seen.is_over or self._stopping.is_set():
                return True
            took = clock() - begun
            await self._wait(max(WATCH_INTERVAL, took * WATCH_SHARE))

    async def _wait(self, seconds: float) -> None:
        await wait_for_event(self._stopping, seconds)
        await self._look()

    async def _look(self) -> None:
        """See now and then whether an operator has paused or cancelled the job."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_INTERVAL:
            await self._work.use(self._save.check)
            self._looked_at = now

    async def _write(self, job: Job) -> None:
        async def write(connection: psycopg.AsyncConnection) -> None:
            await self._save.write(connection, job)

        await self._work.use(write)
        self._save.job = job

    def _interrupted(self) -> Job:
        return replace(self._save.job, state=JobState.INTERRUPTED)

    def _end_soon(self, whole: asyncio.Timeout) -> None:
        whole.reschedule(asyncio.get_running_loop().time() + self._drain_timeout + CLOSING)

    def _how_far(self, error: Exception) -> str:
        done = f"{self._of_this_run} {self._work.things} are done"
        goes_on = f"`relay jobs resume {self._save.job.id}` goes on"
        return f"{done}, {self._work.left}: {one_line(error)}; {goes_on}"
