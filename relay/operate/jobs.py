"""What can be asked of jobs; the table is relay/jobs/job.py."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from relay.errors import UsageError
from relay.jobs.job import (
    Job,
    JobFailure,
    Kind,
    cancel_job,
    cancellable,
    list_failures,
    list_jobs,
    pause_job,
    read_job,
    resume_job,
)
from relay.operate.asked import Closed, Cursor, Id, Limit, MaybeReasoned, Next, Page, Reasoned, next_cursor, read_cursor
from relay.operate.operation import Effect, Role, Servers, operation

JOBS, FAILURES = "jobs", "job-failures"
# What a job does decides who may order it, and who may let it go on.
ROLES = {
    Kind.REPLAY: Role.OPERATOR,
    Kind.RETRY: Role.OPERATOR,
    Kind.ARCHIVE: Role.OPERATOR,
    Kind.RESTORE: Role.OPERATOR,
    Kind.DISCARD: Role.OWNER,
}


@dataclass(frozen=True, slots=True)
class Ordered:
    """A job that a console runs, and what was named for it and is not there, with the reason."""

    job: Job
    not_found: list[str]


def job_of(given: object) -> Job:
    """Return the job of what an operation has ordered."""
    match given:
        case Job():
            return given
        case Ordered():
            return given.job
        case _:
            raise TypeError(f"{type(given).__name__} is no job")


class ListJobs(Closed):
    """Which page of which jobs."""

    kind: Annotated[Kind | None, Field(description="Only of this kind.")] = None
    cursor: Cursor = None
    limit: Limit = 20


class JobPage(Page):
    """A page of jobs, the newest first."""

    rows: list[Job]
    next: Next


class FailurePage(Closed):
    """Which page of the rows that failed."""

    cursor: Cursor = None
    limit: Limit = 100


class ShowJob(FailurePage):
    """Which job, and which page of the rows that failed in it."""

    job: Id


class ShownJob(Page):
    """A job with a page of the rows that failed in it, by id."""

    job: Job
    failures: list[JobFailure]
    next: Next


class TurnJob(MaybeReasoned):
    """Which job pauses or goes on, and why if that is told."""

    job: Id


class CancelJob(Reasoned):
    """Which job ends, and why."""

    job: Id


@operation("jobs.list", "GET /jobs", Role.VIEWER)
def list_(at: Servers, asked: ListJobs) -> JobPage:
    """List jobs, the newest first."""
    before = read_cursor(JOBS, asked.cursor)
    with at.connect(None) as tables:
        rows = list_jobs(tables, limit=asked.limit, kind=asked.kind, before=before)
    return JobPage(rows=rows, next=next_cursor(JOBS, [row.id for row in rows], asked.limit))


@operation("jobs.show", "GET /jobs/{job}", Role.VIEWER)
def show(at: Servers, asked: ShowJob) -> ShownJob:
    """Show one job and the rows that failed in it."""
    after = read_cursor(FAILURES, asked.cursor) or 0
    with at.connect(None) as tables:
        found = read_job(tables, asked.job)
        failures = list_failures(tables, asked.job, limit=asked.limit, after=after)
    following = next_cursor(FAILURES, [row.id for row in failures], asked.limit)
    return ShownJob(job=found, failures=failures, next=following)


@operation("jobs.pause", "POST /jobs/{job}/pause", Role.OPERATOR, Effect.STORED)
def pause(at: Servers, asked: TurnJob) -> Job:
    """Pause a job; what runs it stops within a second, or when its list is made."""
    with at.connect(None) as tables:
        return pause_job(tables, asked.job, by=at.by, why=asked.reason)


@operation("jobs.resume", "POST /jobs/{job}/resume", Role.OPERATOR, Effect.RESUMED)
def resume(at: Servers, asked: TurnJob) -> Job:
    """Let a job go on that was ordered of a console; a command goes on with its jobs by `relay jobs resume`."""
    with at.connect(None) as tables:
        found = read_job(tables, asked.job)
        at.require(ROLES[found.kind])
        if not found.by_console:
            raise UsageError(f"job {found.id} was not ordered of a console: `relay jobs resume {found.id}` goes on")
        return resume_job(tables, asked.job, by=at.by, why=asked.reason)


@operation("jobs.cancel", "POST /jobs/{job}/cancel", Role.OPERATOR, Effect.STORED)
def cancel(at: Servers, asked: CancelJob) -> Job:
    """End a job for good; what runs it stops within a second, or when its list is made."""
    with at.connect(None) as tables:
        cancellable(read_job(tables, asked.job))
        return cancel_job(tables, asked.job, by=at.by, why=asked.why)
