"""`/replay`: send again what was sent."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.given import Operations, Operator, Viewer, within
from relay.console.api.once import Once
from relay.console.api.paging import next_cursor, read_cursor
from relay.console.api.parameters import Closed, Cursor, Id, Limit, ReplayFilter, Why
from relay.operations.results import ReplayPreview
from relay.replay.job import Failure, Job

router = APIRouter(prefix="/replay", tags=["replay"])
JOBS, FAILURES = "replay", "replay-failure"
Next = Annotated[str | None, Field(description="The cursor of the next page; null on the last one.")]


class JobPage(Closed):
    """A page of replays, the newest first."""

    rows: list[Job]
    next: Next


class ShownJob(Closed):
    """A replay with a page of the rows that it could not send, by id."""

    job: Job
    failures: list[Failure]
    next: Next


class Cancel(Closed):
    """Why a replay is ended."""

    why: Why


@router.get("")
def list_(operations: Operations, _: Viewer, cursor: Cursor = None, limit: Limit = 20) -> JobPage:
    """List replays, the newest first."""
    rows = operations.list_replays(limit=limit, before=read_cursor(JOBS, cursor))
    return JobPage(rows=rows, next=next_cursor(JOBS, [row.id for row in rows], limit))


@router.get("/preview")
def preview(operations: Operations, _: Viewer, asked: Annotated[ReplayFilter, Query()]) -> ReplayPreview:
    """Count exactly what a replay would send, by day."""
    return operations.preview_replay(asked.filter())


@router.get("/{job}")
def show(operations: Operations, _: Viewer, job: Id, cursor: Cursor = None, limit: Limit = 100) -> ShownJob:
    """Show one replay and the rows that it could not send."""
    found = operations.show_replay(job, limit=limit, after=read_cursor(FAILURES, cursor) or 0)
    following = next_cursor(FAILURES, [row.id for row in found.failures], limit)
    return ShownJob(job=found.job, failures=found.failures, next=following)


@router.post("/{job}/cancel", response_model=Job)
def cancel(request: Request, once: Once, who: Operator, *, job: Id, asked: Cancel) -> Response:
    """End a replay for good; a process that runs it stops within a second, or when its list is made."""
    return once.in_transaction(
        who.name, Job, lambda connection: within(request, connection).cancel_replay(job, by=who.name, why=asked.why)
    )
