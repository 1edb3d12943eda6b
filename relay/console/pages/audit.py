"""`/audit`: who has done what, and why; `/audit.csv`: the same as a file."""

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse

from relay.console.given import Here, Viewer
from relay.console.templates import page
from relay.errors import UsageError
from relay.operate import audit
from relay.operate.asked import Words
from relay.operate.audit import ListAudit, as_csv, pages_of

router = APIRouter()

LISTED = 100
COMMANDS = (
    "parked retry", "parked discard", "parked archive", "parked restore", "quarantine reroute", "quarantine discard",
    "quarantine pause", "quarantine resume", "lanes pause", "lanes resume", "dead-letters retry",
    "dead-letters discard", "held retry", "message reveal", "replay", "replay cancel", "jobs pause", "jobs resume",
    "jobs cancel", "batches give-up", "retention", "topology apply", "parked edit",
)  # fmt: skip


class AuditFilters(BaseModel):
    """The filters of the form; what is empty selects nothing away."""

    model_config = ConfigDict(extra="ignore")

    by: Words = ""
    command: Words = ""
    job: Words = ""
    since: Words = ""
    until: Words = ""
    rows: bool = False
    cursor: Words = ""

    def asked(self) -> ListAudit:
        """Return the request.

        Raises:
            UsageError: the job is no number, or a text is too long.
        """
        given = {name: value for name, value in self.model_dump().items() if value}
        try:
            return ListAudit(**given, limit=LISTED)
        except ValidationError as error:
            (first, *_) = error.errors()
            raise UsageError(f"{first['loc'][0]}: {first['msg']}") from None

    def query(self, **changed: object) -> str:
        """Return the query of an address with these filters, and others changed."""
        given = {**self.model_dump(exclude={"cursor"}), **changed}
        return urlencode({name: "true" if value is True else value for name, value in given.items() if value})


Filters = Annotated[AuditFilters, Query()]


@router.get("/audit")
def show(request: Request, site: Here, who: Viewer, filters: Filters) -> HTMLResponse:
    """Show a page of the audit, the newest first."""
    words, found = "", None
    try:
        found = site.do(audit.list_, filters.asked(), who)
    except UsageError as error:
        words = str(error).replace("--", "")  # the fields of the form are no flags
    return page(request, "audit.html", found=found, words=words, filters=filters, commands=COMMANDS)


@router.get("/audit.csv")
def download(site: Here, who: Viewer, filters: Filters) -> StreamingResponse:
    """Return all that the filters select, as CSV."""
    pages = pages_of(site.servers(who), filters.asked())
    first = next(pages)  # an error of the request or of the database is an answer, and no half of a file

    def lines() -> Iterator[str]:
        yield as_csv(first, header=True)
        for deeds in pages:
            yield as_csv(deeds, header=False)

    headers = {"Content-Disposition": 'attachment; filename="audit.csv"'}
    return StreamingResponse(lines(), media_type="text/csv", headers=headers)
