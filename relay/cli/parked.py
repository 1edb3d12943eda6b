"""`relay parked`."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

import psycopg
from cyclopts import App, Parameter, validators

from relay.cli.consent import EXCERPT, Audit, Consent, Loss, show_excerpt
from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.options import DatabaseOptions, DryRun, Group, MessageFilters, Output, Rate, Stages, check_choice
from relay.cli.printing import aside, complain, counted, print_json, print_pairs, print_table, say
from relay.cli.running import BULK_TIMEOUT, run_rows
from relay.jobs.job import JobKind
from relay.jobs.stages import Pacing
from relay.observe.printable import utc
from relay.operate.parked import Parked, ParkedMessage, Selection, list_parked, show_parked
from relay.operate.release import Done, make_release, preview
from relay.operate.session import session
from relay.operate.whereabouts import row_ids

LIST_COLUMNS = ("id", "message id", "type", "key", "event", "attempts", "parked at", "behind", "held", "reason")

app = App(name="parked", help="See, retry, discard, archive or restore what could not be delivered.")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Filters(MessageFilters):
    """Which rows."""

    reason: Annotated[str | None, Parameter(help="A part of the reason.")] = None
    group: Group = None
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
        choices = "ids, a filter such as --reason or --event-type, or --all for every parked row"
        check_choice(is_filtered=not selection.is_everything, is_all=self.all_, choices=choices)
        return selection


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFilters(MessageFilters):
    """Which archived rows."""

    job: Annotated[int | None, Parameter(help="Of this job, which has archived them.")] = None
    all_: Annotated[bool, Parameter(name="--all", help="Every archived row; needed when there is no filter.")] = False

    def bulk_selection(self, named: Sequence[str]) -> Selection:
        """Return the rows to park again.

        Raises:
            UsageError: no row was chosen, and --all was not given; or both were.
        """
        ids = row_ids(named)
        selection = Selection(
            ids=[each for each in ids if isinstance(each, int)] or None,
            message_ids=[each for each in ids if isinstance(each, UUID)] or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            job=self.job,
        )
        choices = "ids, a filter such as --job or --event-type, or --all for every archived row"
        check_choice(is_filtered=not selection.is_everything, is_all=self.all_, choices=choices)
        return selection


Ids = Annotated[str, Parameter(name="ID", help="Ids or message ids; all that the filters select unless given.")]


@app.command(name="list")
def list_(
    *ids: Ids,
    options: DatabaseOptions = DatabaseOptions(),
    filters: Filters = Filters(),
    held: Annotated[bool, Parameter(help="Also rows that only wait behind another one.")] = False,
    output: Output = "text",
) -> ExitCode:
    """List parked rows, at most 100 unless --limit says otherwise."""
    selection = filters.selection(ids)
    if selection.limit is None:
        selection = selection.at_most(100)
    database = options.load().settings.database
    with session(database) as connection:
        rows, total = list_parked(connection, database.schema_name, selection, with_held=held)
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
    options: DatabaseOptions = DatabaseOptions(),
    full: Annotated[bool, Parameter(help="The whole payload, not only its first 1000 characters.")] = False,
    output: Output = "text",
) -> ExitCode:
    """Show one parked, discarded or archived row with its payload."""
    (named,) = row_ids([row])
    database = options.load().settings.database
    with session(database) as connection:
        message = show_parked(connection, database.schema_name, named, length=2**31 - 1 if full else 1000)
    if output == "json":
        print_json(message)
    else:
        print_pairs(_show_rows(message))
    return ExitCode.DONE


@app.command(name="retry")
def retry_(
    *ids: Ids,
    options: DatabaseOptions = DatabaseOptions(),
    filters: BulkFilters = BulkFilters(),
    pacing: Stages = Stages(),
    audit: Audit = Audit(),
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Send rows again, with all their attempts; rows held behind them follow in order."""
    selection = filters.bulk_selection(ids)
    bulk = _Bulk(options, JobKind.RETRY, selection, pacing.pacing())
    return bulk.preview(output) if dry_run else bulk.run(audit, output)


@app.command(name="discard")
def discard_(
    *ids: Ids,
    options: DatabaseOptions = DatabaseOptions(),
    filters: BulkFilters = BulkFilters(),
    rate: Rate = None,
    consent: Consent = Consent(),
    output: Output = "text",
) -> ExitCode:
    """Discard rows: they are kept and never sent; rows held behind them go out."""
    bulk = _Bulk(options, JobKind.DISCARD, filters.bulk_selection(ids), Pacing(rate=rate))
    return bulk.run_with(consent, output)


@app.command
def archive(
    *ids: Ids,
    options: DatabaseOptions = DatabaseOptions(),
    filters: BulkFilters = BulkFilters(),
    rate: Rate = None,
    consent: Consent = Consent(),
    output: Output = "text",
) -> ExitCode:
    """Set rows aside: they are kept, and `restore` parks them again; rows held behind them go out."""
    bulk = _Bulk(options, JobKind.ARCHIVE, filters.bulk_selection(ids), Pacing(rate=rate))
    return bulk.run_with(consent, output)


@app.command
def restore(
    *ids: Ids,
    options: DatabaseOptions = DatabaseOptions(),
    filters: RestoreFilters = RestoreFilters(),
    rate: Rate = None,
    audit: Audit = Audit(),
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Park rows again that were archived."""
    bulk = _Bulk(options, JobKind.RESTORE, filters.bulk_selection(ids), Pacing(rate=rate))
    return bulk.preview(output) if dry_run else bulk.run(audit, output)


class _Bulk:
    """A job that a command makes."""

    def __init__(self, options: DatabaseOptions, kind: JobKind, selection: Selection, pacing: Pacing) -> None:
        self._options = options
        self._kind = kind
        self._selection = selection
        self._pacing = pacing

    def preview(self, output: Output) -> ExitCode:
        """Print what the job would do."""
        database = self._options.load().settings.database
        with session(database, timeout=BULK_TIMEOUT) as connection:
            return self._show(preview(connection, database.schema_name, self._selection, self._kind), output)

    def run(self, audit: Audit, output: Output) -> ExitCode:
        """Make the job and run it."""
        settings = self._options.load().settings
        with session(settings.database, timeout=BULK_TIMEOUT) as connection:
            job = make_release(
                connection,
                settings.database.schema_name,
                self._kind,
                self._selection,
                by=audit.operator,
                why=audit.reason or None,
                pacing=self._pacing,
            )
            return run_rows(connection, settings, job, output)

    def run_with(self, consent: Consent, output: Output) -> ExitCode:
        """Make the job and run it, if the operator consents to what it would do."""
        consent.check()
        database = self._options.load().settings.database
        schema = database.schema_name
        if not consent.yes or consent.dry_run:
            with session(database, timeout=BULK_TIMEOUT) as connection:
                if consent.dry_run:
                    done = preview(connection, schema, self._selection, self._kind)
                    show_excerpt(self._loss(connection, schema, done))
                    return self._show(done, output)
                if not consent.is_given(
                    lambda: self._loss(connection, schema, preview(connection, schema, self._selection, self._kind))
                ):
                    return ExitCode.FAILED
        return self.run(consent, output)

    def _loss(self, connection: psycopg.Connection, schema: str, foreseen: Done) -> Loss:
        rows, _ = list_parked(connection, schema, self._selection.at_most(EXCERPT), with_held=False)
        return Loss(
            self._foreseen(foreseen),
            rows[0].created_at if rows else None,
            [(row.id, row.aggregate_type, row.aggregate_id, row.event_type, row.last_error) for row in rows],
        )

    def _foreseen(self, done: Done) -> str:
        behind = f", and release {done.released} held behind {'it' if done.chosen == 1 else 'them'}"
        return f"{self._kind} {counted(done.chosen, 'row')}{'' if self._kind is JobKind.RESTORE else behind}"

    def _show(self, done: Done, output: Output) -> ExitCode:
        if output == "json":
            print_json({"chosen": done.chosen, "released": done.released, "not_found": done.not_found})
        else:
            say(f"would {self._foreseen(done)}")
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
