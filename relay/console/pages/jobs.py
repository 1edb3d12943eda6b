"""`/jobs`: bulk work, how far it is, and its end."""

from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.forms import InputError
from relay.console.given import FormWords, Here, Once, Operator, Viewer
from relay.console.templates import page
from relay.operate import jobs
from relay.operate.asked import Id
from relay.operate.operation import Role

router = APIRouter()

LISTED = 50
FAILURES = 50


@router.get("/jobs")
def list_jobs(request: Request, site: Here, who: Viewer) -> HTMLResponse:
    """Show the newest jobs."""
    return page(request, "jobs.html", jobs=site.do(jobs.list_, jobs.ListJobs(limit=LISTED), who).rows)


@router.get("/jobs/{job}")
def show_job(request: Request, site: Here, who: Viewer, job: Id) -> HTMLResponse:
    """Show how far a job is, the rows that failed in it, and what can be done."""
    shown = site.do(jobs.show, jobs.ShowJob(job=job, limit=FAILURES), who)
    return page(request, "job.html", job=shown.job, failures=shown.failures, can_turn=who.role.includes(Role.OPERATOR))


@router.post("/jobs/{job}/{turn}")
def turn_job(
    site: Here,
    who: Operator,
    once: Once,
    *,
    job: Id,
    turn: Literal["pause", "resume", "cancel"],
    why: FormWords = "",
) -> Response:
    """Pause a job, let it go on, or end it for good."""
    match turn:
        case "pause":
            site.change(jobs.pause, jobs.TurnJob(job=job, why=why), who, once)
        case "resume":
            site.change(jobs.resume, jobs.TurnJob(job=job, why=why), who, once)
        case "cancel":
            if not why:
                raise InputError("why", "say why the job ends: the audit keeps it")
            site.change(jobs.cancel, jobs.CancelJob(job=job, why=why), who, once)
    return RedirectResponse(f"/jobs/{job}", HTTPStatus.SEE_OTHER)
