"""`/`: whether all is well, and what is in the way."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.access.identity import Identity, Role, require
from relay.console.templates import page
from relay.operate.status import read_status

router = APIRouter()


@router.get("/")
def overview(request: Request, _: Annotated[Identity, Depends(require(Role.VIEWER))]) -> HTMLResponse:
    """Show the state of the outbox in words, then its figures."""
    database = request.app.state.database
    with database.session() as connection:
        status = read_status(connection, database.schema, progress_timeout=0)
    return page(request, "overview.html", status=status)
