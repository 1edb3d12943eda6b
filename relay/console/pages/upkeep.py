"""`/retention` and `/batches`: which days will go, and what Spark has written."""

from dataclasses import dataclass
from datetime import date
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Form
from psycopg.sql import SQL
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.forms import said
from relay.console.given import Alone, Configured, FormWords, Here, Once, Operator, Owner, Sessions, Viewer
from relay.console.templates import page
from relay.errors import UsageError
from relay.operate import batches
from relay.operate.asked import AppId, Version
from relay.operate.operation import Role
from relay.operate.retention import drop_old_days, keeps_of, look_at_old_days

router = APIRouter()

LISTED = 100
ARCHIVED = SQL("SELECT day, rows, path FROM {schema}.archived_day ORDER BY day DESC LIMIT %(limit)s")


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """A day of sent rows that Spark has written into files."""

    day: date
    rows: int
    path: str


@router.get("/retention")
def retention(request: Request, settings: Configured, database: Sessions, who: Viewer, _: Alone) -> HTMLResponse:
    """Show the days that are older than is kept, and those that are archived."""
    keeps = keeps_of(settings.relay, None, None)
    days = look_at_old_days(settings.database, keeps)
    with database.session() as tables:
        archived = tables.rows(ArchivedDay, ARCHIVED, {"limit": LISTED})
    return page(
        request,
        "retention.html",
        keeps={kind.parent: kept for kind, kept in keeps.items()},
        days=days,
        archived=archived,
        can_drop=who.role.includes(Role.OWNER),
    )


@router.post("/retention")
def drop(settings: Configured, who: Owner, _: Alone, why: FormWords = "") -> Response:
    """Drop the days that are older than is kept, as a running relay does each hour."""
    keeps = keeps_of(settings.relay, None, None)
    if not keeps:
        raise UsageError("retention is off: relay.retention tells how long to keep")
    drop_old_days(settings.database, keeps, by=who.name, why=said(why))
    return RedirectResponse("/retention", HTTPStatus.SEE_OTHER)


@router.get("/batches")
def show_batches(request: Request, site: Here, who: Viewer) -> HTMLResponse:
    """Show the newest batches of Spark."""
    found = site.do(batches.list_, batches.ListBatches(limit=LISTED), who)
    return page(request, "batches.html", batches=found, may_give_up=who.role.includes(Role.OPERATOR))


@router.post("/batches/give-up")
def give_up(
    site: Here,
    who: Operator,
    once: Once,
    *,
    app_id: Annotated[AppId, Form()],
    version: Annotated[Version, Form()],
    why: FormWords = "",
) -> Response:
    """Let no more of a batch be written."""
    site.change(batches.give_up, batches.GiveUp(app_id=app_id, version=version, why=said(why)), who, once)
    return RedirectResponse("/batches", HTTPStatus.SEE_OTHER)
