"""`/restore`: park again what was archived or discarded: rows, or all that a job has set aside."""

from typing import Annotated, Any

from fastapi import APIRouter, Form, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from relay.console.forms import FieldError
from relay.console.given import Here, Once, Operator
from relay.console.templates import page
from relay.errors import UsageError
from relay.jobs.job import Kind
from relay.operate.asked import Id, RowName, Words
from relay.operate.parked import asked as parked

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
    given = asked.filter()
    archived = not (asked.job or asked.discarded)
    listed = parked.ListParked.model_construct(limit=SHOWN, archived=archived, **given)
    return page(
        request,
        "restore.html",
        asked=asked,
        foreseen=site.do(parked.preview, parked.PreviewParked.model_construct(kind=Kind.RESTORE, **given), who),
        rows=site.do(parked.list_, listed, who).rows,
    )


@router.post("/restore")
def restore(site: Here, who: Operator, once: Once, asked: Annotated[Chosen, Form()]) -> Response:
    """Order a job that parks the rows again; the console runs it."""
    given = asked.filter()
    if not asked.why:
        raise FieldError("why", "say why: the audit keeps it with each message that you restore")
    return site.order(parked.restore, parked.RestoreParked.model_construct(why=asked.why, **given), who, once)
