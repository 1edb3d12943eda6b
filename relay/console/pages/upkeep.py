"""`/retention` and `/batches`: which days will go, and what Spark has written."""

from http import HTTPStatus
from typing import Any

import psycopg
from fastapi import APIRouter
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.access.identity import Role
from relay.console.given import Alone, Configured, FormWords, Owner, Sessions, Viewer
from relay.console.templates import page
from relay.errors import UsageError
from relay.operate.retention import drop_old_days, keeps_of, look_at_old_days

router = APIRouter()

LISTED = 100
ARCHIVED = SQL("SELECT day, rows, path FROM {schema}.archived_day ORDER BY day DESC LIMIT %(limit)s")
# A batch has a row for the whole (partition -1). One in pieces has a row that says how many they are (-2), then one for
# each of them. A job may have written anything into row_counts, so it is shown as text.
BATCHES = SQL("""
    SELECT app_id, version, partition = -1 AS is_committed, partitions, committed_at,
        row_counts ->> 'rows' AS rows, row_counts ->> 'table' AS tables, row_counts ->> 'messages' AS messages,
        row_counts ->> 'seconds' AS seconds, row_counts ->> 'repeats' AS repeats,
        (SELECT count(*) FROM {schema}.batch AS piece
            WHERE (piece.app_id, piece.version) = (batch.app_id, batch.version) AND piece.partition >= 0) AS pieces
    FROM {schema}.batch
    WHERE partition = -1 OR partition = -2 AND NOT EXISTS (
        SELECT FROM {schema}.batch AS whole
        WHERE (whole.app_id, whole.version, whole.partition) = (batch.app_id, batch.version, -1))
    ORDER BY committed_at DESC
    LIMIT %(limit)s
""")


@router.get("/retention")
def retention(request: Request, settings: Configured, database: Sessions, who: Viewer, _: Alone) -> HTMLResponse:
    """Show the days that are older than is kept, and those that are archived."""
    keeps = keeps_of(settings.relay, None, None)
    days = look_at_old_days(settings.database, keeps)
    with database.session() as connection:
        archived = _rows(connection, ARCHIVED, database.schema)
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
    if not why:
        raise UsageError("say why: the audit keeps it with each day that you drop")
    drop_old_days(settings.database, keeps, by=who.name, why=why)
    return RedirectResponse("/retention", HTTPStatus.SEE_OTHER)


@router.get("/batches")
def batches(request: Request, database: Sessions, _: Viewer) -> HTMLResponse:
    """Show the newest batches of Spark."""
    with database.session() as connection:
        found = _rows(connection, BATCHES, database.schema)
    return page(request, "batches.html", batches=found)


def _rows(connection: psycopg.Connection, statement: SQL, schema: str) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement.format(schema=Identifier(schema)), {"limit": LISTED}).fetchall()
