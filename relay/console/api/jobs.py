"""`/jobs`: bulk work."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Once
from relay.console.api.paging import next_cursor, read_cursor
from relay.console.given import ROLES, Operations, Operator, Viewer, within
from relay.console.site import site_of
from relay.errors import UsageError
from relay.jobs.job import Job, JobFailure, Kind
from relay.operate.asked import Closed, Cursor, Id, Limit, MaybeReasoned, Reasoned

router = APIRouter(prefix="/jobs", tags=["jobs"])
JOBS, FAILURES = "jobs", "job-failures"
Next = Annotated[str | None, Field(description="The cursor of the next page; null on the last one.")]


class JobPage(Closed):
    """A page of jobs, the newest first."""

    rows: list[Job]
    next: Next


class ShownJob(Closed):
    """A job with a page of the rows that failed in it, by id."""

    job: Job
    failures: list[JobFailure]
    next: Next


@router.get("")
def list_(
    operations: Operations,
    _: Viewer,
    *,
    kind: Annotated[Kind | None, Query(description="Only of this kind.")] = None,
    cursor: Cursor = None,
    limit: Limit = 20,
) -> JobPage:
    """List jobs, the newest first."""
    rows = operations.list_jobs(limit=limit, kind=kind, before=read_cursor(JOBS, cursor))
    return JobPage(rows=rows, next=next_cursor(JOBS, [row.id for row in rows], limit))


@router.get("/{job}")
def show(operations: Operations, _: Viewer, job: Id, cursor: Cursor = None, limit: Limit = 100) -> ShownJob:
    """Show one job and the rows that failed in it."""
    found = operations.show_job(job, limit=limit, after=read_cursor(FAILURES, cursor) or 0)
    following = next_cursor(FAILURES, [row.id for row in found.failures], limit)
    return ShownJob(job=found.job, failures=found.failures, next=following)


@router.post("/{job}/pause", response_model=Job)
def pause(request: Request, once: Once, who: Operator, *, job: Id, asked: MaybeReasoned) -> Response:
    """Pause a job; what runs it stops within a second, or when its list is made."""
    return once.in_transaction(
        who.name,
        Job,
        lambda connection: within(request, connection).pause_job(job, by=who.name, why=asked.reason),
    )


@router.post("/{job}/resume", response_model=Job)
def resume(
    request: Request, operations: Operations, once: Once, who: Operator, *, job: Id, asked: MaybeReasoned
) -> Response:
    """Let a job go on that was ordered of a console; a command goes on with its jobs by `relay jobs resume`."""
    found = operations.show_job(job, limit=1).job
    who.require(ROLES[found.kind])
    if not found.by_console:
        raise UsageError(f"job {job} was not ordered of a console: `relay jobs resume {job}` goes on")
    answer = once.in_transaction(
        who.name,
        Job,
        lambda connection: within(request, connection).resume_job(job, by=who.name, why=asked.reason),
    )
    site_of(request).runner.wake()
    return answer


@router.post("/{job}/cancel", response_model=Job)
def cancel(request: Request, once: Once, who: Operator, *, job: Id, asked: Reasoned) -> Response:
    """End a job for good; what runs it stops within a second, or when its list is made."""
    return once.in_transaction(
        who.name, Job, lambda connection: within(request, connection).cancel_job(job, by=who.name, why=asked.why)
    )
