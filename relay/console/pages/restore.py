"""`/restore`: park again what was archived or discarded: rows, or all that a job has set aside."""

from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Form, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from relay.console.access.identity import Identity
from relay.console.forms import said
from relay.console.given import Here, Once, Operator
from relay.console.site import Site
from relay.console.templates import page
from relay.errors import DeadlineError, UsageError
from relay.jobs.job import Kind, Source
from relay.operate import jobs
from relay.operate.asked import Id, RowName, Words
from relay.operate.parked import asked as parked
from relay.operate.parked.read import Parked, first_parked
from relay.operate.parked.work import ParkedDone

router = APIRouter()

SHOWN = 20  # rows


class Chosen(BaseModel):
    """Which rows that were set aside."""

    model_config = ConfigDict(extra="ignore")

    job: Id | None = None
    id: Annotated[tuple[RowName, ...], Field(max_length=SHOWN)] = ()
    discarded: bool = False
    why: Words = ""

    def filter(self) -> dict[str, Any]:
        """Return what an operation asks; UsageError when it chooses nothing."""
        if not self.job and not self.id:
            raise UsageError("name a job or a row: the page of a message, and that of a job, lead here")
        return {"job": self.job, "ids": self.id, "discarded": self.discarded}


@router.get("/restore")
def ask_to_restore(request: Request, site: Here, who: Operator, asked: Annotated[Chosen, Query()]) -> HTMLResponse:
    """Show what a restore would park again."""
    wanted = parked.PreviewParked.model_construct(kind=Kind.RESTORE, **asked.filter())
    foreseen, rows = _foreseen(site, who, wanted), list[Parked]()
    # A job's first rows may stand behind a million others.
    with suppress(DeadlineError), site.database.session() as tables:
        state = wanted.source(tables) or Source.ARCHIVED
        selection = wanted.selection(SHOWN)
        rows = first_parked(tables, selection, with_held=True, state=state)
    return page(request, "restore.html", asked=asked, foreseen=foreseen, rows=rows)


def _foreseen(site: Site, who: Identity, wanted: parked.PreviewParked) -> ParkedDone:
    """Return what a restore would do; where counting takes too long, as many as the job has set aside."""
    try:
        return site.do(parked.preview, wanted, who)
    except DeadlineError:
        if wanted.job is None:
            raise
        job = site.do(jobs.show, jobs.ShowJob.model_construct(job=wanted.job, limit=1), who).job
        return ParkedDone(job.done, 0, [])


@router.post("/restore")
def restore(site: Here, who: Operator, once: Once, asked: Annotated[Chosen, Form()]) -> Response:
    """Order a job that parks the rows again; the console runs it."""
    wanted = parked.RestoreParked.model_construct(**asked.filter(), why=said(asked.why))
    return site.order(parked.restore, wanted, who, once)
