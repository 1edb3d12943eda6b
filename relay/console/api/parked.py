"""`/parked`: what could not be delivered."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.given import Operations, Operator, Owner, Sessions, Viewer, within
from relay.console.api.once import Once
from relay.console.api.paging import next_cursor, read_cursor
from relay.console.api.parameters import (
    MOST,
    Closed,
    Cursor,
    Limit,
    ParkedFilter,
    RowName,
    Text,
    Why,
    check_choice,
    row_id,
)
from relay.operate.message import note_reveal
from relay.operate.parked import Parked, ParkedMessage, Selection
from relay.operate.release import Done

router = APIRouter(prefix="/parked", tags=["parked"])
KIND = "parked"


class Listing(ParkedFilter):
    """Which page of which rows."""

    held: Annotated[bool, Field(description="Also rows that only wait behind another one.")] = False
    cursor: Cursor = None
    limit: Limit = 100


class ParkedPage(Closed):
    """A page of parked rows, by id."""

    rows: list[Parked]
    total: Annotated[int, Field(description="Over all pages.")]
    next: Annotated[str | None, Field(description="The cursor of the next page; null on the last one.")]


class Change(ParkedFilter):
    """Which rows to change."""

    all: Annotated[bool, Field(description="Every parked row; needed when there is no filter.")] = False
    limit: Annotated[Limit, Field(description="The first so many, by id.")] = MOST


class Retry(Change):
    """Which rows to send again, and why."""

    why: Text = ""


class Discard(Change):
    """Which rows to give up, and why."""

    why: Why


@router.get("")
def list_(operations: Operations, _: Viewer, asked: Annotated[Listing, Query()]) -> ParkedPage:
    """List parked rows."""
    after = read_cursor(KIND, asked.cursor) or 0
    found = operations.list_parked(asked.selection(asked.limit), with_held=asked.held, after=after)
    return ParkedPage(
        rows=found.rows, total=found.total, next=next_cursor(KIND, [row.id for row in found.rows], asked.limit)
    )


@router.get("/preview")
def preview(operations: Operations, _: Viewer, asked: Annotated[ParkedFilter, Query()]) -> Done:
    """Count exactly what a retry or discard would do now."""
    return operations.preview_parked(asked.selection(None))


@router.get("/{row}")
def show(
    request: Request,
    database: Sessions,
    who: Operator,
    *,
    row: RowName,
    full: Annotated[bool, Query(description="The whole payload, not only its first 1000 characters.")] = False,
) -> ParkedMessage:
    """Show one parked or discarded row with its payload, whose bytes are base64; the audit notes who read it."""
    with database.session() as connection, connection.transaction():
        shown = within(request, connection).show_parked(row_id(row), is_full=full)
        note_reveal(connection, database.schema, str(shown.id), by=who.name)
    return shown


@router.post("/retry", response_model=Done)
def retry(request: Request, once: Once, who: Operator, asked: Retry) -> Response:
    """Send rows again, with all their attempts; rows held behind them follow in order."""
    selection = _chosen(asked)
    return once.in_transaction(
        who.name,
        Done,
        lambda connection: within(request, connection).retry_parked(
            selection, by=who.name, why=asked.why.strip() or None
        ),
    )


@router.post("/discard", response_model=Done)
def discard(request: Request, once: Once, who: Owner, asked: Discard) -> Response:
    """Discard rows: they are kept and never sent; rows held behind them go out."""
    selection = _chosen(asked)
    return once.in_transaction(
        who.name,
        Done,
        lambda connection: within(request, connection).discard_parked(selection, by=who.name, why=asked.why),
    )


def _chosen(asked: Change) -> Selection:
    selection = asked.selection(asked.limit)
    check_choice(is_filtered=not selection.is_everything, is_all=asked.all)
    return selection
