"""`relay parked`."""

import base64
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.consent import EXCERPT, Audit, Consent, Loss, show_excerpt, show_loss
from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.job_runs import (
    Careful,
    Rate,
    behind_words,
    changed_words,
    how_it_ended,
    shown_rows,
)
from relay.cli.operations import Operations, RemoteDatabaseOptions
from relay.cli.options import DryRun, Flags, Most, Output, check_choice
from relay.cli.printing import aside, complain, counted, print_json, print_pairs, print_table, say
from relay.errors import UsageError
from relay.jobs.job import Caution, Kind
from relay.observe.printable import utc
from relay.operate.asked import Many
from relay.operate.messages.text import changes, indented, shown
from relay.operate.messages.whereabouts import row_id
from relay.operate.parked import asked as parked
from relay.operate.parked.asked import AsideFilter, ChangeParked, ParkedFilter, RestoreParked, RetryParked
from relay.operate.parked.edit import Edit, parse_headers
from relay.operate.parked.read import Parked, ParkedMessage
from relay.operate.parked.work import ParkedDone

LIST_COLUMNS = (
    "id", "message id", "type", "key", "event", "attempts", "parked at", "behind", "held", "written as", "reason",
)  # fmt: skip

app = App(name="parked", help="See, retry, edit, archive, discard or restore what could not be delivered.")


Filters = Annotated[ParkedFilter, Flags]
Ids = Annotated[str, Parameter(name="ID", help="Ids or message ids; all that the filters select unless given.")]


@app.command(name="list")
def list_(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: Filters = ParkedFilter(),
    held: Annotated[bool, Parameter(help="Also rows that only wait behind another one.")] = False,
    archived: Annotated[bool, Parameter(help="The archived rows, in place of the parked ones.")] = False,
    aside_of: Annotated[AsideFilter, Flags] = AsideFilter(),
    limit: Most = 100,
    output: Output = "text",
) -> ExitCode:
    """List parked rows."""
    asked = parked.ListParked.model_construct(
        ids=ids, held=held, archived=archived, limit=limit, **dict(filters), **dict(aside_of)
    )
    found = options.operations().do(parked.list_, asked)
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
    row_id(row)
    message = options.operations().do(parked.reveal, parked.RevealParked.model_construct(row=row, full=full))
    if output == "json":
        print_json(message)
    else:
        print_pairs(_show_rows(message))
    return ExitCode.DONE


@app.command(name="retry")
def retry_(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: Filters = ParkedFilter(),
    many: Annotated[Many, Flags] = Many(),
    audit: Audit = Audit(),
    careful: Careful = Careful(),
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Send rows again, with all their attempts; rows held behind them follow in order."""
    asked = _asked(ids, filters, many, audit=audit, caution=careful.caution())
    if dry_run:
        return _foresee(options.operations(), Kind.RETRY, asked, output)
    return _change(options, Kind.RETRY, asked, audit, output=output)


@app.command(name="discard")
def discard_(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: Filters = ParkedFilter(),
    many: Annotated[Many, Flags] = Many(),
    consent: Consent = Consent(),
    rate: Rate = None,
    output: Output = "text",
) -> ExitCode:
    """Discard rows: they are kept, and not sent unless a restore parks them again; rows held behind them go out."""
    asked = _asked(ids, filters, many, audit=consent, caution=Caution(rate=rate))
    consent.check()
    operations = options.operations()
    if consent.dry_run:
        show_excerpt(_loss(operations, asked))
        return _foresee(operations, Kind.DISCARD, asked, output)
    if not consent.is_given(lambda: _loss(operations, asked)):
        return ExitCode.FAILED
    return _change(options, Kind.DISCARD, asked, consent, output=output)


@app.command
def edit(
    row: Annotated[str, Parameter(help="Its id or message id.")],
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    payload: Annotated[Path | None, Parameter(help="A file with the new payload; else it stays.")] = None,
    headers: Annotated[
        Path | None, Parameter(help="A file with all headers, as a JSON object; else they stay.")
    ] = None,
    discard: Annotated[
        bool, Parameter(help="Discard the old row; else it stays parked, and may hold up the copy.")
    ] = False,
    consent: Consent = Consent(),
    output: Output = "text",
) -> ExitCode:
    """Send an edited copy of a parked row, as a new message behind all others of its key that names the old one."""
    row_id(row)
    changed = _edit(payload, headers)
    consent.check()
    operations = options.operations()
    asked = parked.EditParked.model_construct(
        row=row,
        payload=changed.payload if isinstance(changed.payload, str) else None,
        payload_bytes=changed.payload if isinstance(changed.payload, bytes) else None,
        headers=changed.headers,
        discard=discard,
        why=consent.reason,
    )
    what = f"send an edited copy of {row}{' and discard it' if discard else ''}"
    if consent.dry_run:
        show_loss(Loss(what))
        _show_changes(operations, row, changed)
        return ExitCode.DONE
    if not consent.is_given(lambda: _loss_of_edit(operations, row, changed, what)):
        return ExitCode.FAILED
    done = operations.do(parked.edit, asked, by=consent.operator)
    if output == "json":
        print_json(done)
    else:
        released = f", {counted(done.released, 'row')} behind it released" if done.discarded else ""
        old = f"{done.old_id} is discarded{released}" if done.discarded else f"{done.old_id} stays parked"
        say(f"sent as {done.id}, message id {done.message_id}; {old}")
    return ExitCode.DONE


def _edit(payload: Path | None, headers: Path | None) -> Edit:
    """Return what the files have.

    Raises:
        UsageError: there is no file, it cannot be read, or the headers are no JSON object.
    """
    if payload is None and headers is None:
        raise UsageError("give --payload, --headers, or both: `relay parked retry` sends the row as it is")
    body = None if payload is None else _read("--payload", payload)
    said = None if headers is None else parse_headers(_text(_read("--headers", headers)) or "")
    return Edit(payload=body if body is None else _text(body) or body, headers=said)


def _read(flag: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {file}: {error.strerror}") from None


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _loss_of_edit(operations: Operations, row: str, changed: Edit, what: str) -> Loss:
    _show_changes(operations, row, changed)
    return Loss(what)


def _show_changes(operations: Operations, row: str, changed: Edit) -> None:
    """Print the lines that differ on stderr, out of the way of a pipe."""
    old = operations.do(parked.reveal, parked.RevealParked.model_construct(row=row, full=True, why="to edit it"))
    if changed.headers is not None:
        before, after = (json.dumps(each or {}, ensure_ascii=False) for each in (old.headers, changed.headers))
        _show_lines("headers", indented(before), indented(after))
    if changed.payload is not None:
        body = changed.payload if isinstance(changed.payload, bytes) else changed.payload.encode()
        text = changed.payload if isinstance(changed.payload, str) and old.payload is not None else None
        said = shown(old.payload, old.payload_bytes, is_whole=True)
        _show_lines("payload", said.text, shown(text, body, is_whole=True).text)


def _show_lines(name: str, before: str, after: str) -> None:
    lines = changes(before, after)
    aside(f"{name}: {'what changes' if lines else 'the values stay'}")
    for line in lines:
        aside(line)


@app.command
def archive(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: Filters = ParkedFilter(),
    many: Annotated[Many, Flags] = Many(),
    audit: Audit = Audit(),
    rate: Rate = None,
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Set rows aside: they are kept, and `relay parked restore` parks them again; rows held behind them go out."""
    asked = _asked(ids, filters, many, audit=audit, caution=Caution(rate=rate))
    return _set_aside(options, Kind.ARCHIVE, asked, audit, dry_run=dry_run, output=output)


@app.command
def restore(
    *ids: Ids,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: Filters = ParkedFilter(),
    many: Annotated[Many, Flags] = Many(),
    aside_of: Annotated[AsideFilter, Flags] = AsideFilter(),
    audit: Audit = Audit(),
    rate: Rate = None,
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Park archived or discarded rows again, each with its reason."""
    asked = RestoreParked.model_construct(
        ids=ids, why=audit.reason, rate=rate, **dict(filters), **dict(many), **dict(aside_of)
    )
    _check_choice(asked)
    return _set_aside(options, Kind.RESTORE, asked, audit, dry_run=dry_run, output=output)


def _asked(ids: tuple[str, ...], filters: ParkedFilter, many: Many, *, audit: Audit, caution: Caution) -> RetryParked:
    """Return which rows to change, and how.

    Raises:
        UsageError: no row was chosen, and --all was not given; or both were.
    """
    asked = RetryParked.model_construct(ids=ids, why=audit.reason, **dict(filters), **dict(many), **asdict(caution))
    _check_choice(asked)
    return asked


def _check_choice(asked: ChangeParked) -> None:
    choices = "ids, a filter such as --group or --event-type, or --all for every row"
    check_choice(is_filtered=not asked.selection(None).is_everything, is_all=asked.all, choices=choices)


def _set_aside(
    options: RemoteDatabaseOptions,
    kind: parked.RowsKind,
    asked: ChangeParked,
    audit: Audit,
    *,
    dry_run: bool,
    output: Output,
) -> ExitCode:
    if dry_run:
        return _foresee(options.operations(), kind, asked, output)
    audit.check_reason()
    return _change(options, kind, asked, audit, output=output)


def _foresee(operations: Operations, kind: parked.RowsKind, asked: ChangeParked, output: Output) -> ExitCode:
    done = operations.do(parked.preview, _foreseen_of(kind, asked))
    if output == "json":
        print_json(done)
    else:
        say(f"would {_foreseen(kind, done)}")
    return _complain(done)


def _change(
    options: RemoteDatabaseOptions, kind: parked.RowsKind, asked: ChangeParked, audit: Audit, *, output: Output
) -> ExitCode:
    with shown_rows(options.log_settings(), f"{kind} rows") as show:
        ordered, job = options.operations().finish(parked.CHANGES[kind], asked, by=audit.operator, show=show)
    done = ParkedDone(
        job.done, job.released, ordered.not_found, job.id, job.state, failed=job.failed, waiting=job.waiting
    )
    if output == "json":
        print_json(done)
    else:
        say(changed_words(job))
    return max(_complain(done), how_it_ended(job))


def _foreseen_of(kind: parked.RowsKind, asked: ChangeParked) -> parked.PreviewParked:
    return parked.PreviewParked.model_construct(kind=kind, limit=asked.limit, **asked.filter)


def _loss(operations: Operations, asked: RetryParked) -> Loss:
    foreseen = operations.do(parked.preview, _foreseen_of(Kind.DISCARD, asked))
    rows = operations.do(parked.list_, parked.ListParked.model_construct(**asked.filter, limit=EXCERPT)).rows
    return Loss(
        _foreseen(Kind.DISCARD, foreseen),
        rows[0].created_at if rows else None,
        [(row.id, row.aggregate_type, row.aggregate_id, row.event_type, row.last_error) for row in rows],
    )


def _foreseen(kind: Kind, done: ParkedDone) -> str:
    released = "" if kind is Kind.RESTORE else f", and release {behind_words(done.chosen, done.released)}"
    return f"{kind} {counted(done.chosen, 'row')}{released}"


def _complain(done: ParkedDone) -> ExitCode:
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
