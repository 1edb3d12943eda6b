"""`relay parked`."""

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Annotated
from uuid import UUID

import psycopg
from cyclopts import App, Parameter, validators

from relay.cli.consent import EXCERPT, Consent, Loss, show_excerpt
from relay.cli.options import By, DatabaseOptions, DryRun, MessageFilters, Output, Why
from relay.cli.printing import aside, complain, print_json, print_pairs, print_table, say
from relay.errors import UsageError
from relay.operate.parked import Parked, ParkedMessage, Selection, list_parked, show_parked
from relay.operate.release import Done, discard, preview, retry
from relay.operate.session import session
from relay.operate.whereabouts import row_ids

BULK_TIMEOUT = 600.0  # seconds for a statement: one head may have a million rows behind it
LIST_COLUMNS = ("id", "message id", "type", "key", "event", "attempts", "parked at", "behind", "held", "reason")

app = App(name="parked", help="See, retry or discard what could not be delivered.")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Filters(MessageFilters):
    """Which rows."""

    reason: Annotated[str | None, Parameter(help="A part of the reason.")] = None
    limit: Annotated[
        int | None, Parameter(help="Only the first so many, by id.", validator=validators.Number(gte=1))
    ] = None

    def selection(self, named: Sequence[str]) -> Selection:
        ids = row_ids(named)
        return Selection(
            ids=[each for each in ids if isinstance(each, int)] or None,
            message_ids=[each for each in ids if isinstance(each, UUID)] or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            reason=self.reason,
            limit=self.limit,
        )


Ids = Annotated[str, Parameter(name="ID", help="Ids or message ids; all that the filters select unless given.")]
All = Annotated[bool, Parameter(name="--all", help="Every parked row; needed when there is no filter.")]


@app.command(name="list")
def list_(
    *ids: Ids,
    options: DatabaseOptions | None = None,
    filters: Filters | None = None,
    held: Annotated[bool, Parameter(help="Also rows that only wait behind another one.")] = False,
    output: Output = "text",
) -> int:
    """List parked rows, at most 100 unless --limit says otherwise."""
    selection = (filters or Filters()).selection(ids)
    if selection.limit is None:
        selection = selection.at_most(100)
    database = (options or DatabaseOptions()).load().settings.database
    with session(database) as connection:
        rows, total = list_parked(connection, database.schema_name, selection, with_held=held)
    if output == "json":
        print_json({"total": total, "rows": rows})
        return 0
    # `show` tells the message id; on a terminal the reason needs its room.
    left_out = {"message id"} if sys.stdout.isatty() else set()
    kept = [index for index, column in enumerate(LIST_COLUMNS) if column not in left_out]
    print_table([LIST_COLUMNS[index] for index in kept], [[_list_row(row)[index] for index in kept] for row in rows])
    if total > len(rows):
        aside(f"{total - len(rows)} more: --limit {total} lists them all")
    return 0


@app.command
def show(
    row: Annotated[str, Parameter(help="Its id or message id.")],
    /,
    *,
    options: DatabaseOptions | None = None,
    full: Annotated[bool, Parameter(help="The whole payload, not only its first 1000 characters.")] = False,
    output: Output = "text",
) -> int:
    """Show one parked or discarded row with its payload."""
    (named,) = row_ids([row])
    database = (options or DatabaseOptions()).load().settings.database
    with session(database) as connection:
        message = show_parked(connection, database.schema_name, named, length=2**31 - 1 if full else 1000)
    if output == "json":
        print_json(message)
    else:
        print_pairs(_show_rows(message))
    return 0


@app.command(name="retry")
def retry_(
    *ids: Ids,
    options: DatabaseOptions | None = None,
    filters: Filters | None = None,
    why: Why = "",
    by: By = None,
    all_: All = False,
    dry_run: DryRun = False,
    output: Output = "text",
) -> int:
    """Send rows again, with all their attempts; rows held behind them follow in order."""
    selection = _bulk(filters, ids, everything=all_)
    database = (options or DatabaseOptions()).load().settings.database
    with session(database, timeout=BULK_TIMEOUT) as connection:
        if dry_run:
            done = preview(connection, database.schema_name, selection)
        else:
            done = retry(connection, database.schema_name, selection, by=by, why=why.strip() or None)
    return _report("retry", done, output, dry_run=dry_run)


@app.command(name="discard")
def discard_(
    *ids: Ids,
    options: DatabaseOptions | None = None,
    filters: Filters | None = None,
    consent: Consent | None = None,
    all_: All = False,
    output: Output = "text",
) -> int:
    """Give rows up: they are kept and never sent; rows held behind them go out."""
    selection = _bulk(filters, ids, everything=all_)
    consent = consent or Consent()
    consent.check()
    database = (options or DatabaseOptions()).load().settings.database
    schema = database.schema_name
    with session(database, timeout=BULK_TIMEOUT) as connection:
        if consent.dry_run:
            done = preview(connection, schema, selection)
            show_excerpt(_loss(connection, schema, selection, done))
        elif consent.is_given(lambda: _loss(connection, schema, selection, preview(connection, schema, selection))):
            done = discard(connection, schema, selection, by=consent.operator, why=consent.reason)
        else:
            return 1
    return _report("discard", done, output, dry_run=consent.dry_run)


def _loss(connection: psycopg.Connection, schema: str, selection: Selection, foreseen: Done) -> Loss:
    rows, _ = list_parked(connection, schema, selection.at_most(EXCERPT), with_held=False)
    return Loss(
        _foreseen("discard", foreseen),
        rows[0].created_at if rows else None,
        [(row.id, row.aggregate_type, row.aggregate_id, row.event_type, row.last_error) for row in rows],
    )


def _foreseen(verb: str, done: Done) -> str:
    rows, behind = ("row", "it") if done.chosen == 1 else ("rows", "them")
    return f"{verb} {done.chosen} {rows}, and release {done.released} held behind {behind}"


def _bulk(filters: Filters | None, ids: Sequence[str], *, everything: bool) -> Selection:
    selection = (filters or Filters()).selection(ids)
    if selection.is_everything and not everything:
        raise UsageError("give ids, a filter such as --reason or --event-type, or --all for every parked row")
    if everything and not selection.is_everything:
        raise UsageError("--all and a filter exclude each other")
    return selection


def _report(verb: str, done: Done, output: Output, *, dry_run: bool) -> int:
    """Print what was done; 3 when some of the rows named were not there, 1 when none was."""
    if output == "json":
        print_json(done)
    else:
        rows, behind = ("row", "it") if done.chosen == 1 else ("rows", "them")
        if dry_run:
            say(f"would {_foreseen(verb, done)}")
        else:
            past = {"retry": "retried", "discard": "discarded"}[verb]
            say(f"{past} {done.chosen} {rows}, and released {done.released} held behind {behind}")
    for reason in done.not_found:
        complain(reason)
    if done.not_found:
        return 3 if done.chosen else 1
    return 0


def _list_row(row: Parked) -> tuple[object, ...]:
    parked_at = row.parked_at and row.parked_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return (
        row.id,
        row.message_id,
        row.aggregate_type,
        row.aggregate_id,
        row.event_type,
        row.attempts,
        parked_at,
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
