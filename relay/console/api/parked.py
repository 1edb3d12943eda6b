"""`/parked`: what could not be delivered."""

from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Asked, Once
from relay.console.api.paging import next_cursor, read_cursor
from relay.console.api.parameters import (
    Closed,
    Cursor,
    Limit,
    MaybeReasoned,
    Paced,
    ParkedFilter,
    RowName,
    Staged,
    Text,
    Why,
    check_choice,
    row_id,
)
from relay.console.given import Operations, Operator, Owner, Sessions, Viewer, within
from relay.jobs.job import Kind
from relay.operate.messages.message import note_reveal
from relay.operate.messages.whereabouts import MAX_ID
from relay.operate.parked.read import ARCHIVED, PARKED, Parked, ParkedMessage
from relay.operate.parked.work import Done
from relay.operations.results import Ordered

router = APIRouter(prefix="/parked", tags=["parked"])
KIND = "parked"
RowsKind = Literal[Kind.RETRY, Kind.DISCARD, Kind.ARCHIVE, Kind.RESTORE]


class Listing(ParkedFilter):
    """Which page of which rows."""

    held: Annotated[bool, Field(description="Also rows that only wait behind another one.")] = False
    archived: Annotated[bool, Field(description="The archived rows, in place of the parked ones.")] = False
    cursor: Cursor = None
    limit: Limit = 100


class ParkedPage(Closed):
    """A page of parked rows, by id."""

    rows: list[Parked]
    total: Annotated[int, Field(description="Over all pages.")]
    next: Annotated[str | None, Field(description="The cursor of the next page; null on the last one.")]


class RevealRow(MaybeReasoned):
    """How much of a row's payload to read, and why."""

    full: Annotated[bool, Field(description="The whole payload, not only its first 1000 characters.")] = False


class Change(ParkedFilter, Paced):
    """Which rows a job changes, and why."""

    all: Annotated[bool, Field(description="Every row; needed when there is no filter.")] = False
    limit: Annotated[int | None, Field(ge=1, le=MAX_ID, description="The first so many, by id.")] = None
    why: Why


class Retry(Change, Staged):
    """Which rows to send again, and how carefully."""

    why: Text = ""


@router.get("")
def list_(operations: Operations, _: Viewer, asked: Annotated[Listing, Query()]) -> ParkedPage:
    """List parked rows."""
    after = read_cursor(KIND, asked.cursor) or 0
    state = ARCHIVED if asked.archived else PARKED
    found = operations.list_parked(asked.selection(asked.limit), with_held=asked.held, state=state, after=after)
    return ParkedPage(
        rows=found.rows, total=found.total, next=next_cursor(KIND, [row.id for row in found.rows], asked.limit)
    )


class Foreseen(ParkedFilter):
    """What a job of a kind would change."""

    kind: RowsKind = Kind.RETRY
    limit: Annotated[int | None, Field(ge=1, le=MAX_ID)] = None


@router.get("/preview")
def preview(operations: Operations, _: Viewer, asked: Annotated[Foreseen, Query()]) -> Done:
    """Count exactly what a job of this kind would do now."""
    return operations.preview_parked(asked.kind, asked.selection(asked.limit))


@router.post("/{row}/reveal")
def reveal(request: Request, database: Sessions, who: Operator, *, row: RowName, asked: RevealRow) -> ParkedMessage:
    """Show one parked or discarded row with its payload, whose bytes are base64; the audit notes who read it."""
    with database.session() as connection, connection.transaction():
        shown = within(request, connection).show_parked(row_id(row), is_full=asked.full)
        note_reveal(connection, database.schema, str(shown.id), by=who.name, why=asked.reason)
    return shown


@router.post("/retry", status_code=HTTPStatus.ACCEPTED, response_model=Ordered)
def retry(request: Request, once: Once, who: Operator, asked: Retry) -> Response:
    """Send rows again, with all their attempts; rows held behind them follow in order."""
    return _order(request, once, Kind.RETRY, asked, by=who.name)


@router.post("/discard", status_code=HTTPStatus.ACCEPTED, response_model=Ordered)
def discard(request: Request, once: Once, who: Owner, asked: Change) -> Response:
    """Discard rows: they are kept and never sent; rows held behind them go out."""
    return _order(request, once, Kind.DISCARD, asked, by=who.name)


@router.post("/archive", status_code=HTTPStatus.ACCEPTED, response_model=Ordered)
def archive(request: Request, once: Once, who: Operator, asked: Change) -> Response:
    """Set rows aside: they are kept, and a restore parks them again; rows held behind them go out."""
    return _order(request, once, Kind.ARCHIVE, asked, by=who.name)


@router.post("/restore", status_code=HTTPStatus.ACCEPTED, response_model=Ordered)
def restore(request: Request, once: Once, who: Operator, asked: Change) -> Response:
    """Park archived rows again, each with its reason."""
    return _order(request, once, Kind.RESTORE, asked, by=who.name)


def _order(request: Request, once: Asked, kind: Kind, asked: Change, *, by: str) -> Response:
    """Order a job, which a console runs."""
    selection, caution = asked.selection(asked.limit), asked.caution()
    check_choice(is_filtered=not selection.is_everything, is_all=asked.all)
    answer = once.in_transaction(
        by,
        Ordered,
        lambda connection: within(request, connection).order_parked(
            kind, selection, by=by, why=asked.why.strip() or None, caution=caution
        ),
        status=HTTPStatus.ACCEPTED,
    )
    request.app.state.runner.wake()
    return answer
