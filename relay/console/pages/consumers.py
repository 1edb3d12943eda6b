"""`/consumers`: what each consumer applies, what waits for it, and what is in its way."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.given import Here, Viewer
from relay.console.templates import page

router = APIRouter()


@router.get("/consumers")
async def consumers(request: Request, site: Here, _: Viewer) -> HTMLResponse:
    """Show what the latest look saw."""
    return page(request, "consumers.html", seen=site.consumers.latest)
