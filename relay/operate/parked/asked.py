"""What can be asked of parked rows: the noun `parked`."""

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Base64Bytes, Field

from relay.errors import UsageError
from relay.jobs.job import Kind
from relay.operate.asked import (
    MAX_ID,
    Cursor,
    Group,
    Limit,
    MaybeReasoned,
    MessageFilter,
    Next,
    Paced,
    Page,
    Reasoned,
    RowName,
    RowNames,
    Staged,
    Text,
    Why,
    check_choice,
)
from relay.operate.jobs import Ordered
from relay.operate.messages.message import note_reveal
from relay.operate.messages.whereabouts import row_ids
from relay.operate.operation import BULK_TIMEOUT, Effect, Operation, Role, Servers, operation
from relay.operate.paging import next_cursor, read_cursor
from relay.operate.parked.edit import Edit, Edited, send_edited
from relay.operate.parked.read import ARCHIVED, PARKED, Parked, ParkedMessage, ParkedSelection, list_parked, show_parked
from relay.operate.parked.work import ParkedDone, order_rows, rows_not_found
from relay.operate.parked.work import preview as count_changed

FIRST_PART = 1000  # characters of a payload, unless all of it is wanted
ROWS = "parked"  # the list that a cursor is of

RowsKind = Literal[Kind.RETRY, Kind.DISCARD, Kind.ARCHIVE, Kind.RESTORE]


class ParkedFilter(MessageFilter):
    """Which parked rows."""

    ids: RowNames = ()
    reason: Annotated[Text | None, Field(description="A part of the reason.")] = None
    group: Group = None

    def selection(self, limit: int | None) -> ParkedSelection:
        """Return the rows that it means; UsageError for what is no id."""
        ids = row_ids(self.ids)
        return ParkedSelection(
            ids=[each for each in ids if isinstance(each, int)] or None,
            message_ids=[each for each in ids if isinstance(each, UUID)] or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            reason=self.reason,
            group=self.group,
            limit=limit,
        )


class ListParked(ParkedFilter):
    """Which page of which rows."""

    held: Annotated[bool, Field(description="Also rows that only wait behind another one.")] = False
    archived: Annotated[bool, Field(description="The archived rows, in place of the parked ones.")] = False
    cursor: Cursor = None
    limit: Limit = 100


class ParkedPage(Page):
    """A page of parked rows, by id."""

    rows: list[Parked]
    total: Annotated[int, Field(description="Over all pages.")]
    next: Next


class PreviewParked(ParkedFilter):
    """What a job of a kind would change."""

    kind: RowsKind = Kind.RETRY
    limit: Annotated[int | None, Field(ge=1, le=MAX_ID)] = None


class Reveal(MaybeReasoned):
    """How much of a row's payload to read, and why."""

    full: Annotated[bool, Field(description="The whole payload, not only its first 1000 characters.")] = False


class RevealParked(Reveal):
    """Which row to read, how much of its payload, and why."""

    row: RowName


class ChangeParked(ParkedFilter, Paced):
    """Which rows a job changes, and why."""

    all: Annotated[bool, Field(description="Every row; needed when there is no filter.")] = False
    limit: Annotated[int | None, Field(ge=1, le=MAX_ID, description="The first so many, by id.")] = None
    why: Why


class RetryParked(ChangeParked, Staged):
    """Which rows to send again, and how carefully."""

    why: Text = ""


class SendEdited(Reasoned):
    """What is new of a row, what becomes of the old one, and why; what is null stays as it is."""

    payload: Annotated[str | None, Field(description="As text; JSON where the content type says so.")] = None
    payload_bytes: Annotated[Base64Bytes | None, Field(description="In place of `payload`: bytes in base64.")] = None
    headers: Annotated[dict[str, Any] | None, Field(description="All of them.")] = None
    discard: Annotated[
        bool,
        Field(description="Discard the old row. Else it stays parked, and may hold up the copy."),
    ] = False
    message_id: Annotated[
        UUID | None, Field(description="Of the copy, else a new one; a second request with it is refused.")
    ] = None

    @property
    def edit(self) -> Edit:
        """What is new; UsageError for two payloads."""
        if self.payload is not None and self.payload_bytes is not None:
            raise UsageError("give payload or payload_bytes, not both")
        return Edit(payload=self.payload_bytes if self.payload is None else self.payload, headers=self.headers)


class EditParked(SendEdited):
    """Which row, what is new of it, what becomes of the old one, and why."""

    row: RowName


@operation("parked.list", "GET /parked", Role.VIEWER)
def list_(at: Servers, asked: ListParked) -> ParkedPage:
    """List parked rows."""
    selection, after = asked.selection(asked.limit), read_cursor(ROWS, asked.cursor) or 0
    state = ARCHIVED if asked.archived else PARKED
    with at.connect(None) as tables:
        rows, total = list_parked(tables, selection, with_held=asked.held, state=state, after=after)
    return ParkedPage(rows=rows, total=total, next=next_cursor(ROWS, [row.id for row in rows], asked.limit))


@operation("parked.preview", "GET /parked/preview", Role.VIEWER)
def preview(at: Servers, asked: PreviewParked) -> ParkedDone:
    """Count exactly what a job of this kind would do now."""
    with at.connect(BULK_TIMEOUT) as tables:
        return count_changed(tables, asked.kind, asked.selection(asked.limit))


@operation("parked.reveal", "POST /parked/{row}/reveal", Role.OPERATOR)
def reveal(at: Servers, asked: RevealParked) -> ParkedMessage:
    """Show one parked or discarded row with its payload, whose bytes are base64; the audit notes who read it."""
    (named,) = row_ids([asked.row])
    with at.connect(None) as tables, tables.transaction():
        shown = show_parked(tables, named, length=2**31 - 1 if asked.full else FIRST_PART)
        if at.by_console:  # who has the database's password reads the table without a note, too
            note_reveal(tables, str(shown.id), by=at.by, why=asked.reason)
    return shown


@operation("parked.retry", "POST /parked/retry", Role.OPERATOR, Effect.ORDERED)
def retry(at: Servers, asked: RetryParked) -> Ordered:
    """Send rows again, with all their attempts; rows held behind them follow in order."""
    return _order(at, Kind.RETRY, asked)


@operation("parked.discard", "POST /parked/discard", Role.OWNER, Effect.ORDERED)
def discard(at: Servers, asked: ChangeParked) -> Ordered:
    """Discard rows: they are kept and never sent; rows held behind them go out."""
    return _order(at, Kind.DISCARD, asked)


@operation("parked.archive", "POST /parked/archive", Role.OPERATOR, Effect.ORDERED)
def archive(at: Servers, asked: ChangeParked) -> Ordered:
    """Set rows aside: they are kept, and a restore parks them again; rows held behind them go out."""
    return _order(at, Kind.ARCHIVE, asked)


@operation("parked.restore", "POST /parked/restore", Role.OPERATOR, Effect.ORDERED)
def restore(at: Servers, asked: ChangeParked) -> Ordered:
    """Park archived rows again, each with its reason."""
    return _order(at, Kind.RESTORE, asked)


@operation("parked.edit", "POST /parked/{row}/edit", Role.OWNER, Effect.STORED)
def edit(at: Servers, asked: EditParked) -> Edited:
    """Send an edited copy of a row as a new message that names the old one; discard that, or leave it parked."""
    (named,) = row_ids([asked.row])
    with at.connect(BULK_TIMEOUT) as tables:
        return send_edited(
            tables,
            named,
            asked.edit,
            discard=asked.discard,
            by=at.by,
            why=asked.why,
            most_bytes=at.settings.relay.max_message_bytes,
            message_id=asked.message_id,
        )


CHANGES: dict[Kind, Operation[Any, Ordered]] = {
    Kind.RETRY: retry,
    Kind.DISCARD: discard,
    Kind.ARCHIVE: archive,
    Kind.RESTORE: restore,
}


def _order(at: Servers, kind: Kind, asked: ChangeParked) -> Ordered:
    """Write down a job."""
    selection, caution = asked.selection(asked.limit), asked.caution()
    check_choice(is_filtered=not selection.is_everything, is_all=asked.all)
    with at.connect(BULK_TIMEOUT) as tables:
        not_found = rows_not_found(tables, kind, selection)
        job = order_rows(
            tables, kind, selection, by=at.by, why=asked.why.strip() or None, caution=caution, by_console=at.by_console
        )
    return Ordered(job, not_found)
