"""`/jobs`: bulk work, how far it is, and its end."""

from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.given import ROLES, FormWords, Operations, Operator, Viewer
from relay.console.site import site_of
from relay.console.templates import page
from relay.errors import UsageError
from relay.operate.asked import Id
from relay.operate.operation import Role

router = APIRouter()

LISTED = 50
FAILURES = 50


@router.get("/jobs")
def list_jobs(request: Request, operations: Operations, _: Viewer) -> HTMLResponse:
    """Show the newest jobs."""
    return page(request, "jobs.html", jobs=operations.list_jobs(limit=LISTED, kind=None))


@router.get("/jobs/{job}")
def show_job(request: Request, operations: Operations, who: Viewer, job: Id) -> HTMLResponse:
    """Show how far a job is, the rows that failed in it, and what can be done."""
    shown = operations.show_job(job, limit=FAILURES)
    return page(request, "job.html", job=shown.job, failures=shown.failures, can_turn=who.role.includes(Role.OPERATOR))


@router.post("/jobs/{job}/{turn}")
def turn_job(
    request: Request,
    operations: Operations,
    who: Operator,
    *,
    job: Id,
    turn: Literal["pause", "resume", "cancel"],
    why: FormWords = "",
) -> Response:
    """Pause a job, let it go on, or end it for good."""
    match turn:
        case "pause":
            operations.pause_job(job, by=who.name, why=why or None)
        case "resume":
            who.require(ROLES[operations.show_job(job, limit=1).job.kind])
            operations.resume_job(job, by=who.name, why=why or None)
            site_of(request).runner.wake()
        case "cancel":
            if not why:
                raise UsageError("say why the job ends: the audit keeps it")
            operations.cancel_job(job, by=who.name, why=why)
    return RedirectResponse(f"/jobs/{job}", HTTPStatus.SEE_OTHER)
