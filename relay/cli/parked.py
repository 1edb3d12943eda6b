"""`relay parked`."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from cyclopts import App, Parameter, validators

from relay.cli.consent import EXCERPT, Audit, Consent, Loss, show_excerpt
from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.job_runs import (
    Careful,
    Rate,
    behind_words,
    changed_words,
    how_it_ended,
    shown_rows,
)
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.options import DryRun, FailureGroup, MessageFilters, Output, check_choice
from relay.cli.printing import aside, complain, counted, print_json, print_pairs, print_table, say
from relay.jobs.job import Caution, Kind
from relay.observe.printable import utc
from relay.operate.messages.whereabouts import row_ids
from relay.operate.parked.read import ARCHIVED, PARKED, Parked, ParkedMessage, Selection
from relay.operate.parked.work import Done
from relay.operations.operations import Operations

LIST_COLUMNS = (
    "id", "message id", "type", "key", "event", "attempts", "parked at", "behind", "held", "written as", "reason",
)  # fmt: skip

app = App(name="parked", help="See, retry, archive or discard what could not be delivered.")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Filters(MessageFilters):
    """Which rows."""

    reason: Annotated[str | None, Parameter(help="A part of the reason.")] = None
    group: FailureGroup = None
    limit: Annotated[
        int | None, Parameter(help="Only the first so many, by id.", validator=validators.Number(gte=1))
    ] = None

    def selection(self, named: Sequence[str]) -> Selection:
        """Return the rows with these ids or message ids, or all, that the filters select."""
        ids = row_ids(named)
        return Selection(
            ids=[each for each in ids if isinstance(each, int)] or None,
            message_ids=[each for each in ids if isinstance(each, UUID)] or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            reason=self.reason,
            group=self.group,
            limit=self.limit,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BulkFilters(Filters):
    """Which rows, for a command that changes them."""

    all_: Annotated[bool, Parameter(name="--all", help="Every parked row; needed when there is no filter.")] = False

    def bulk_selection(self, named: Sequence[str]) -> Selection:
        """Return the rows to change.

        Raises:
            UsageError: no row was chosen, and --all was not given; or both were.
        """
        selection = self.selection(named)
        choices = "ids, a filter such as --group or --event-type, or --all for every parked row"
        check_choice(is_filtered=not selection.is_everything, is_all=self.all_, choices=choices)
        return selection


Ids = Annotated[str, Parameter(name="ID", help="Ids or message ids; all that the filters select unless given.")]


@app.command(name="list")
def list_(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: Filters = Filters(),
    held: Annotated[bool, Parameter(help="Also rows that only wait behind another one.")] = False,
    archived: Annotated[bool, Parameter(help="The archived rows, in place of the parked ones.")] = False,
    output: Output = "text",
) -> ExitCode:
    """List parked rows, at most 100 unless --limit says otherwise."""
    selection = filters.selection(ids)
    if selection.limit is None:
        selection = selection.at_most(100)
    found = options.operations().list_parked(selection, with_held=held, state=ARCHIVED if archived else PARKED)
    rows, total = found.rows, found.total
    if output == "json":
        print_json({"total": total, "rows": rows})
        return ExitCode.DONE
    # On a terminal the reason needs the room; `show` prints the message id.
    print_table(LIST_COLUMNS, [_list_row(row) for row in rows], wide={"message id"})
    if total > len(rows):
        aside(f"{total - len(rows)} more: --limit {total} lists them all")
    return ExitCode.DONE


@app.command
def show(
    row: Annotated[str, Parameter(help="Its id or message id.")],
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    full: Annotated[bool, Parameter(help="The whole payload, not only its first 1000 characters.")] = False,
    output: Output = "text",
) -> ExitCode:
    """Show one parked, archived or discarded row with its payload."""
    (named,) = row_ids([row])
    message = options.operations().show_parked(named, is_full=full)
    if output == "json":
        print_json(message)
    else:
        print_pairs(_show_rows(message))
    return ExitCode.DONE


@app.command(name="retry")
def retry_(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: BulkFilters = BulkFilters(),
    audit: Audit = Audit(),
    careful: Careful = Careful(),
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Send rows again, with all their attempts; rows held behind them follow in order."""
    selection, caution = filters.bulk_selection(ids), careful.caution()
    if dry_run:
        return _foresee(options.operations(), Kind.RETRY, selection, output)
    return _change(options, Kind.RETRY, selection, audit, caution=caution, output=output)


@app.command(name="discard")
def discard_(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: BulkFilters = BulkFilters(),
    consent: Consent = Consent(),
    rate: Rate = None,
    output: Output = "text",
) -> ExitCode:
    """Discard rows: they are kept and never sent; rows held behind them go out."""
    selection = filters.bulk_selection(ids)
    consent.check()
    operations = options.operations()
    if consent.dry_run:
        show_excerpt(_loss(operations, selection))
        return _foresee(operations, Kind.DISCARD, selection, output)
    if not consent.is_given(lambda: _loss(operations, selection)):
        return ExitCode.FAILED
    return _change(options, Kind.DISCARD, selection, consent, caution=Caution(rate=rate), output=output)


@app.command
def archive(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: BulkFilters = BulkFilters(),
    audit: Audit = Audit(),
    rate: Rate = None,
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Set rows aside: they are kept, and `relay parked restore` parks them again; rows held behind them go out."""
    return _set_aside(
        options, Kind.ARCHIVE, filters.bulk_selection(ids), audit, rate=rate, dry_run=dry_run, output=output
    )


@app.command
def restore(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: BulkFilters = BulkFilters(),
    audit: Audit = Audit(),
    rate: Rate = None,
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Park archived rows again, each with its reason."""
    return _set_aside(
        options, Kind.RESTORE, filters.bulk_selection(ids), audit, rate=rate, dry_run=dry_run, output=output
    )


def _set_aside(
    options: RemoteDatabaseOptions,
    kind: Kind,
    selection: Selection,
    audit: Audit,
    *,
    rate: float | None,
    dry_run: bool,
    output: Output,
) -> ExitCode:
    if not dry_run:
        audit.check_reason()
    if dry_run:
        return _foresee(options.operations(), kind, selection, output)
    return _change(options, kind, selection, audit, caution=Caution(rate=rate), output=output)


def _foresee(operations: Operations, kind: Kind, selection: Selection, output: Output) -> ExitCode:
    done = operations.preview_parked(kind, selection)
    if output == "json":
        print_json(done)
    else:
        say(f"would {_foreseen(kind, done)}")
    return _complain(done)


def _change(
    options: RemoteDatabaseOptions, kind: Kind, selection: Selection, audit: Audit, *, caution: Caution, output: Output
) -> ExitCode:
    operations = options.operations()
    with shown_rows(options.log_settings(), f"{kind} rows") as show:
        done = operations.change_parked(
            kind, selection, by=audit.operator, why=audit.reason or None, caution=caution, show=show
        )
    job = operations.show_job(done.job or 0, limit=1).job
    if output == "json":
        print_json(done)
    else:
        say(changed_words(job))
    return max(_complain(done), how_it_ended(job))


def _loss(operations: Operations, selection: Selection) -> Loss:
    foreseen = operations.preview_parked(Kind.DISCARD, selection)
    rows = operations.list_parked(selection.at_most(EXCERPT), with_held=False, state=PARKED).rows
    return Loss(
        _foreseen(Kind.DISCARD, foreseen),
        rows[0].created_at if rows else None,
        [(row.id, row.aggregate_type, row.aggregate_id, row.event_type, row.last_error) for row in rows],
    )


def _foreseen(kind: Kind, done: Done) -> str:
    released = "" if kind is Kind.RESTORE else f", and release {behind_words(done.chosen, done.released)}"
    return f"{kind} {counted(done.chosen, 'row')}{released}"


def _complain(done: Done) -> ExitCode:
    for reason in done.not_found:
        complain(reason)
    return exit_code(done=done.chosen, left=len(done.not_found))


def _list_row(row: Parked) -> tuple[object, ...]:
    return (
        row.id,
        row.message_id,
        row.aggregate_type,
        row.aggregate_id,
        row.event_type,
        row.attempts,
        row.parked_at and utc(row.parked_at),
        row.held_behind,
        row.held,
        row.written_as,
        row.last_error,
    )


def _show_rows(message: ParkedMessage) -> list[tuple[str, object]]:
    fields = [
        (name, getattr(message, name))
        for name in ParkedMessage.__dataclass_fields__
        if name not in ("headers", "payload", "payload_bytes")
    ]
    headers = None if message.headers is None else json.dumps(message.headers, ensure_ascii=False)
    payload = message.payload
    if message.payload_bytes is not None:
        payload = f"base64 {base64.b64encode(message.payload_bytes).decode()}"
    return [*fields, ("headers", headers), ("payload", payload)]
