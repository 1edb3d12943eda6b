"""Run a job that was ordered: the work that its source asks for, in this process."""

import uvloop

from relay.config.settings import Settings
from relay.jobs.job import Job, Source
from relay.jobs.runner import Run, Show
from relay.jobs.work import Work
from relay.operate.letters.work import LettersDone, LettersWork
from relay.operate.letters.work import Show as ShowLetters
from relay.operate.parked.work import ParkedWork
from relay.operate.routes.work import DiscardWork
from relay.operate.sent.work import ReplayWork
from relay.runtime.memory import collect_rarely


def work_of(settings: Settings, job: Job, *, rate: float | None = None) -> Work:
    """Return what does a job.

    Args:
        rate: of a replay, in place of the job's.
    """
    match job.source:
        case Source.PARKED | Source.ARCHIVED | Source.DISCARDED:
            return ParkedWork(settings.database, job)
        case Source.QUARANTINED:
            return DiscardWork(settings.database, job)
        case Source.DEAD_LETTER:
            return LettersWork(settings.database, settings.broker, job)
        case Source.SENT:
            return ReplayWork(settings, job, rate=rate)


def run_of(settings: Settings, job: Job, work: Work, *, show: Show = lambda _: None) -> Run:
    """Return the run of a job in this process, which begins by `run`."""
    return Run(settings.database.schema_name, job, work, drain_timeout=settings.relay.drain_timeout, show=show)


def run(settings: Settings, job: Job, *, rate: float | None = None, show: Show = lambda _: None) -> Job:
    """Run a job as a command does, until its end or a signal, and return it; raises as `Run.run`."""

    async def until_told() -> Job:
        return await run_of(settings, job, work_of(settings, job, rate=rate), show=show).run_until_told()

    collect_rarely()
    return uvloop.run(until_told())


def run_letters(settings: Settings, job: Job, *, show: ShowLetters = lambda *_: None) -> LettersDone:
    """Do as `run`, and return what became of the letters."""

    async def until_told() -> LettersDone:
        work = LettersWork(settings.database, settings.broker, job, show=show)
        return work.result(await run_of(settings, job, work).run_until_told())

    return uvloop.run(until_told())
