"""`/failures`: what failed, grouped by its cause, and what an operator does with a whole group."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Form
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.access.identity import Identity, RefusedError, Role, require
from relay.console.given import Operations, Viewer
from relay.console.templates import page
from relay.errors import UsageError
from relay.jobs.job import NO_CAUTION, Caution, Kind
from relay.operate.failures import Where, read_group
from relay.operate.parked import PARKED, Selection

router = APIRouter()

SHOWN = 20  # rows of a group
STAGED = Caution(stages=(1, 10, 100), stop_when_failing=0.05)
ROLES = {Kind.RETRY: Role.OPERATOR, Kind.ARCHIVE: Role.OPERATOR, Kind.DISCARD: Role.OWNER}


@router.get("/failures")
def list_failures(request: Request, operations: Operations, _: Viewer) -> HTMLResponse:
    """Show the groups of parked rows, of routes in quarantine, and of held messages."""
    return page(request, "failures.html", groups=operations.list_failures((), with_held=True).groups)


@router.get("/failures/{group}")
def show_failure(request: Request, operations: Operations, who: Viewer, group: str) -> HTMLResponse:
    """Show a group with its first rows, and what can be done."""
    found = read_group(operations.list_failures((), with_held=True).groups, group)
    is_parked = found.source is Where.PARKED
    first = Selection(group=group, limit=SHOWN)
    return page(
        request,
        "failure.html",
        group=found,
        rows=operations.list_parked(first, with_held=False, state=PARKED).rows if is_parked else [],
        routes=operations.list_routes(group=group) if found.source is Where.QUARANTINE else [],
        kinds=[kind for kind, role in ROLES.items() if is_parked and who.role.includes(role)],
        can_probe=who.role.includes(Role.OPERATOR),
    )


@router.post("/failures/{group}/jobs")
def order(
    request: Request,
    operations: Operations,
    who: Annotated[Identity, Depends(require(Role.OPERATOR))],
    *,
    group: str,
    kind: Annotated[Kind, Form()],
    why: Annotated[str, Form(max_length=500)] = "",
    staged: Annotated[bool, Form()] = False,
) -> Response:
    """Order a job over the group; the console runs it."""
    if kind not in ROLES:
        raise UsageError(f"a group is retried, archived or discarded; not {kind}")
    if not who.role.includes(ROLES[kind]):
        raise RefusedError(HTTPStatus.FORBIDDEN, f"{who.name} is {who.role}, and this takes the role {ROLES[kind]}")
    reason = why.replace("\0", "").strip()
    if kind is not Kind.RETRY and not reason:
        raise UsageError(f"say why: the audit keeps it with each row that you {kind}")
    caution = STAGED if staged and kind is Kind.RETRY else NO_CAUTION
    ordered = operations.order_parked(kind, Selection(group=group), by=who.name, why=reason or None, caution=caution)
    request.app.state.runner.wake()
    return RedirectResponse(f"/jobs/{ordered.job.id}", HTTPStatus.SEE_OTHER)


@router.post("/failures/{group}/probe")
def probe(operations: Operations, _: Annotated[Identity, Depends(require(Role.OPERATOR))], group: str) -> Response:
    """Ask the relays to try the routes of the group now."""
    operations.probe([route.id for route in operations.list_routes(group=group)])
    return RedirectResponse("/failures", HTTPStatus.SEE_OTHER)  # a group that is repaired has no page any more
