"""What can be asked of parked rows: the noun `parked`."""

from dataclasses import replace
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Base64Bytes, Field

from relay.errors import UsageError
from relay.jobs.job import Kind, Source, read_job
from relay.operate.asked import (
    MAX_ID,
    Closed,
    Cursor,
    Group,
    Id,
    Limit,
    Many,
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
    next_cursor,
    read_cursor,
)
from relay.operate.jobs import Ordered
from relay.operate.messages.message import note_reveal
from relay.operate.messages.whereabouts import row_id, row_ids
from relay.operate.operation import BULK_TIMEOUT, Effect, Operation, Role, Servers, operation
from relay.operate.parked.edit import Edit, Edited, send_edited
from relay.operate.parked.read import Parked, ParkedMessage, ParkedSelection, list_parked, show_parked
from relay.operate.parked.work import ParkedDone, order_rows, rows_not_found
from relay.operate.parked.work import preview as count_changed
from relay.servers.postgres.tables import Tables

FIRST_PART = 1000  # characters of a payload, unless all of it is wanted
ROWS = "parked"  # the list that a cursor is of

ASIDE = {Kind.ARCHIVE: Source.ARCHIVED, Kind.DISCARD: Source.DISCARDED}  # what jobs of a kind make of rows

RowsKind = Literal[Kind.RETRY, Kind.DISCARD, Kind.ARCHIVE, Kind.RESTORE]


class ParkedFilter(MessageFilter):
    """What parked rows have in common."""

    reason: Annotated[Text | None, Field(description="A part of the reason.")] = None
    group: Group = None


class ParkedRows(ParkedFilter):
    """Which parked rows."""

    ids: RowNames = ()

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


class AsideFilter(Closed):
    """Which rows of those that were set aside."""

    discarded: Annotated[bool, Field(description="The discarded rows.")] = False
    job: Annotated[Id | None, Field(description="What this job has archived or discarded.")] = None


class SetAside(ParkedRows, AsideFilter):
    """Which rows that are parked, or were set aside."""

    def selection(self, limit: int | None) -> ParkedSelection:
        return replace(super().selection(limit), job=self.job)

    def source(self, tables: Tables) -> Source | None:
        """Return what the rows are; None when the request does not say.

        Raises:
            NotFoundError: there is no job of this id.
            UsageError: the job has set no row aside.
        """
        if self.job is None:
            return Source.DISCARDED if self.discarded else None
        found = read_job(tables, self.job)
        if found.source is Source.DEAD_LETTER and found.kind is Kind.DISCARD:
            raise UsageError(f"{found.words} has discarded dead letters: they are gone for good")
        if found.kind not in ASIDE or found.source is Source.DEAD_LETTER:
            raise UsageError(f"{found.words} has neither archived nor discarded rows")
        if self.discarded and found.kind is not Kind.DISCARD:
            raise UsageError(f"{found.words} has archived rows: leave out discarded")
        return ASIDE[found.kind]


class ListParked(SetAside):
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


class PreviewParked(SetAside):
    """What a job of a kind would change."""

    kind: RowsKind = Kind.RETRY
    limit: Annotated[int | None, Field(ge=1, le=MAX_ID)] = None


class Reveal(MaybeReasoned):
    """How much of a row's payload to read, and why."""

    full: Annotated[bool, Field(description="The whole payload, not only its first 1000 characters.")] = False


class RevealParked(Reveal):
    """Which row to read, how much of its payload, and why."""

    row: RowName


class ChangeParked(ParkedRows, Many, Paced):
    """Which rows a job changes, and why."""

    why: Why

    @property
    def filter(self) -> dict[str, Any]:
        """Which rows are meant, for a request that lists or counts them."""
        kept = SetAside.model_fields.keys()
        return {name: value for name, value in dict(self).items() if name in kept}


class RestoreParked(ChangeParked, SetAside):
    """Which rows that were set aside are parked again: the archived ones, unless the request says more."""


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
    if asked.archived and asked.discarded:
        raise UsageError("archived or discarded, not both")
    with at.connect(None) as tables:
        state = asked.source(tables) or (Source.ARCHIVED if asked.archived else Source.PARKED)
        rows, total = list_parked(tables, selection, with_held=asked.held, state=state, after=after)
    return ParkedPage(rows=rows, total=total, next=next_cursor(ROWS, [row.id for row in rows], asked.limit))


@operation("parked.preview", "GET /parked/preview", Role.VIEWER)
def preview(at: Servers, asked: PreviewParked) -> ParkedDone:
    """Count exactly what a job of this kind would do now."""
    with at.connect(BULK_TIMEOUT) as tables:
        aside = asked.source(tables)
        if aside is not None and asked.kind is not Kind.RESTORE:
            raise UsageError(f"discarded and job choose rows for a restore, not for a {asked.kind}")
        return count_changed(tables, asked.kind, asked.selection(asked.limit), aside=aside)


@operation("parked.reveal", "POST /parked/{row}/reveal", Role.OPERATOR)
def reveal(at: Servers, asked: RevealParked) -> ParkedMessage:
    """Show one parked or discarded row with its payload, whose bytes are base64; the audit notes who read it."""
    named = row_id(asked.row)
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
    """Discard rows: they are kept, and not sent unless a restore parks them again; rows held behind them go out."""
    return _order(at, Kind.DISCARD, asked)


@operation("parked.archive", "POST /parked/archive", Role.OPERATOR, Effect.ORDERED)
def archive(at: Servers, asked: ChangeParked) -> Ordered:
    """Set rows aside: they are kept, and a restore parks them again; rows held behind them go out."""
    return _order(at, Kind.ARCHIVE, asked)


@operation("parked.restore", "POST /parked/restore", Role.OPERATOR, Effect.ORDERED)
def restore(at: Servers, asked: RestoreParked) -> Ordered:
    """Park archived or discarded rows again, each with its reason."""
    return _order(at, Kind.RESTORE, asked)


@operation("parked.edit", "POST /parked/{row}/edit", Role.OWNER, Effect.STORED)
def edit(at: Servers, asked: EditParked) -> Edited:
    """Send an edited copy of a row as a new message that names the old one; discard that, or leave it parked."""
    named = row_id(asked.row)
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
        aside = asked.source(tables) if isinstance(asked, RestoreParked) else None
        not_found = rows_not_found(tables, kind, selection, aside=aside)
        job = order_rows(
            tables,
            kind,
            selection,
            by=at.by,
            why=asked.why.strip() or None,
            caution=caution,
            by_console=at.by_console,
            aside=aside,
        )
    return Ordered(job, not_found)
