"""`/audit`: who has done what, and why."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.given import Sessions, Viewer
from relay.console.templates import page
from relay.operate.audit import list_deeds

router = APIRouter()

LISTED = 100


@router.get("/audit")
def audit(
    request: Request, database: Sessions, _: Viewer, after: Annotated[str, Query(max_length=50)] = ""
) -> HTMLResponse:
    """Show a page of the audit, the newest first."""
    with database.session() as tables:
        found = list_deeds(tables, limit=LISTED, after=after or None)
    return page(request, "audit.html", deeds=found.deeds, next=found.next)
