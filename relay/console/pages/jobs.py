"""`/jobs`: bulk work, how far it is, and its end."""

from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.forms import said
from relay.console.given import FormWords, Here, Once, Operator, Viewer
from relay.console.looks import Look
from relay.console.site import Site
from relay.console.templates import page
from relay.errors import UsageError
from relay.jobs.job import Job, Kind, Source
from relay.jobs.runner import WATCH
from relay.operate import jobs
from relay.operate.asked import Id
from relay.operate.letters.audit import notes_of, storable
from relay.operate.letters.letter import Letter
from relay.operate.letters.work import entry_of
from relay.operate.operation import Role

router = APIRouter()

LISTED = 50
FAILURES = 50


@dataclass(frozen=True, slots=True)
class CameBack:
    """Letters of a job that are in their queue again.

    Attributes:
        letters: the first of each group.
        look: that saw them.
        has_changed: whether letters came or went since.
    """

    number: int
    letters: list[Letter]
    look: Look
    has_changed: bool


@router.get("/jobs")
def list_jobs(request: Request, site: Here, who: Viewer) -> HTMLResponse:
    """Show the newest jobs."""
    return page(request, "jobs.html", jobs=site.do(jobs.list_, jobs.ListJobs(limit=LISTED), who).rows)


@router.get("/jobs/{job}")
def show_job(request: Request, site: Here, who: Viewer, job: Id) -> HTMLResponse:
    """Show how far a job is, what failed again in it, and what can be done."""
    shown = site.do(jobs.show, jobs.ShowJob(job=job, limit=FAILURES), who)
    queue = _queue_of(shown.job)
    return page(
        request,
        "job.html",
        job=shown.job,
        failures=shown.failures,
        queue=queue,
        came_back=_came_back(site, shown.job, queue) if queue else None,
        are_looked_for=queue in site.looks.running,
        watch=WATCH,
        can_turn=who.role.includes(Role.OPERATOR),
    )


@router.post("/jobs/{job}/look")
async def look(site: Here, who: Operator, job: Id) -> Response:
    """Look in the background which letters of a job are in their queue again."""
    shown = await run_in_threadpool(site.do, jobs.show, jobs.ShowJob(job=job, limit=1), who)
    if (queue := _queue_of(shown.job)) is None:
        raise UsageError(f"job {job} is not over dead letters: its page has the rows that failed again")
    site.looks.begin(queue)
    return RedirectResponse(f"/jobs/{job}", HTTPStatus.SEE_OTHER)


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
            site.change(jobs.cancel, jobs.CancelJob(job=job, why=said(why)), who, once)
    return RedirectResponse(f"/jobs/{job}", HTTPStatus.SEE_OTHER)


def _queue_of(job: Job) -> str | None:
    """Return the queue of a job over dead letters; None: it is over something else, or no console runs such a job."""
    if job.source is not Source.DEAD_LETTER:
        return None
    with suppress(UsageError):
        return entry_of(job).queue
    return None


def _came_back(site: Site, job: Job, queue: str) -> CameBack | None:
    """Return which letters that a job has sent back the latest look has seen in their queue; None: nobody looked."""
    look, seen = site.looks.latest.get(queue), site.consumers.latest
    if look is None or look.error or job.kind is not Kind.RETRY:
        return None
    with site.database.session() as tables:
        notes = notes_of(tables, job.id, [*look.group_of])
    before = dict(notes)
    letters = [
        each
        for first in look.first.values()
        for each in first
        if (message_id := storable(each.message_id)) in before and each.last_failed_at != before[message_id]
    ]
    now = seen.letters.get(queue) if seen and seen.at > look.at else None
    return CameBack(len(before), letters[:FAILURES], look, has_changed=now not in (None, look.letters))
