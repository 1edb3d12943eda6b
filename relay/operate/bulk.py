"""Run a job that was ordered: the work that its source asks for, in this process."""

import asyncio

from relay.config.settings import Settings
from relay.jobs.job import Job, Source
from relay.jobs.runner import Run, Show
from relay.jobs.work import Work
from relay.operate.letters.work import Done, LettersWork
from relay.operate.letters.work import Show as ShowLetters
from relay.operate.parked.work import ParkedWork
from relay.operate.routes.work import DiscardWork


def work_of(settings: Settings, job: Job) -> Work:
    """Return what does a job."""
    match job.source:
        case Source.PARKED | Source.ARCHIVED:
            return ParkedWork(settings.database, job)
        case Source.QUARANTINED:
            return DiscardWork(settings.database, job)
        case Source.DEAD_LETTER:
            return LettersWork(settings.database, settings.broker, job)
        case Source.SENT:
            raise NotImplementedError


def run_of(settings: Settings, job: Job, work: Work | None = None, *, show: Show = lambda _: None) -> Run:
    """Return the run of a job in this process, which begins by `run`."""
    does = work_of(settings, job) if work is None else work
    return Run(settings.database.schema_name, job, does, drain_timeout=settings.relay.drain_timeout, show=show)


def run(settings: Settings, job: Job, *, show: Show = lambda _: None) -> Job:
    """Run a job as a command does, until its end or a signal, and return it; raises as `Run.run`."""

    async def until_told() -> Job:
        return await run_of(settings, job, show=show).run_until_told()

    return asyncio.run(until_told())


def run_letters(settings: Settings, job: Job, *, show: ShowLetters = lambda *_: None) -> Done:
    """Do as `run`, and return what became of the letters."""

    async def until_told() -> Done:
        work = LettersWork(settings.database, settings.broker, job, show=show)
        return work.result(await run_of(settings, job, work).run_until_told())

    return asyncio.run(until_told())
