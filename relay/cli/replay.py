"""`relay replay`."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated
from uuid import UUID

import psycopg
import uvloop
from cyclopts import App, Parameter, validators

from relay.cli.consent import Consent, Loss, show_loss
from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.options import (
    By,
    MessageFilters,
    MessageIds,
    Options,
    Output,
    check_address,
    check_choice,
)
from relay.cli.printing import aside, complain, print_json, print_pairs, print_table, say
from relay.cli.progress import Seen, shown_progress
from relay.config.settings import Settings
from relay.database import refuse_pooler
from relay.errors import BusyError, OutboxError, PartlyDoneError, UsageError
from relay.logger import get_logger
from relay.observe.printable import utc
from relay.operate.session import session
from relay.operate.whereabouts import Missing, find_rows
from relay.replay.job import Job, cancellable, make_job, read_job
from relay.replay.moment import parse_interval
from relay.replay.run import Progress
from relay.replay.selection import Selection, count_by_day, count_waiting, first_day, now
from relay.replay.serve import serve
from relay.replay.target import check_target

SCAN_TIMEOUT = 3600.0  # seconds for a statement: days of sent rows are read from end to end
LIST_COLUMNS = ("id", "state", "made at", "made by", "filter", "selected", "replayed", "failed", "cancelled by")

app = App(name="replay", help="Send again what was sent; list, show, resume and cancel replays.")
log = get_logger(__name__)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Filters(MessageFilters):
    """Which sent rows."""

    since: Annotated[str | None, Parameter(help="Sent at or after 2026-11-21T08:00:00Z, or 2h ago: `2h`.")] = None
    until: Annotated[str | None, Parameter(help="Sent before; only the days between the two are read.")] = None
    all_: Annotated[bool, Parameter(name="--all", help="Every sent row; needed when there is no filter.")] = False

    def check(self, message_ids: Sequence[UUID]) -> None:
        """Refuse a command that does not say which rows.

        Raises:
            UsageError: there is no id, no filter and no --all; or --all and one of the others.
        """
        choices = "message ids, a filter such as --aggregate-id or --since, or --all for every sent row"
        is_filtered = bool(message_ids) or replace(self, all_=False) != Filters()
        check_choice(is_filtered=is_filtered, is_all=self.all_, choices=choices)

    def selection(self, connection: psycopg.Connection, message_ids: Sequence[UUID]) -> Selection:
        """Return the filter, its moments by the database's clock.

        Raises:
            UsageError: nothing can match it.
        """
        since, until = parse_interval(self.since, self.until, now(connection))
        return Selection(
            message_ids=list(message_ids) or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            since=since,
            until=until,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the rows go."""

    to_exchange: Annotated[str | None, Parameter(help="In place of where they went; '' addresses a queue.")] = None
    routing_key: Annotated[str | None, Parameter(help="In place of theirs; needs --to-exchange.")] = None

    def check(self) -> None:
        """Refuse a target that is incomplete, or that AMQP cannot carry.

        Raises:
            UsageError: says which.
        """
        if self.routing_key is not None and self.to_exchange is None:
            raise UsageError("--routing-key needs --to-exchange: rows of one filter may go to several exchanges")
        check_address(self.to_exchange, self.routing_key)


JobId = Annotated[int, Parameter(help="Its number.")]
Rate = Annotated[
    float | None, Parameter(help="Messages a second, at most.", validator=validators.Number(gt=0, lt=1_000_000))
]


@app.default
def replay(
    *message_ids: MessageIds,
    options: Options = Options(),
    filters: Filters = Filters(),
    target: Target = Target(),
    rate: Rate = None,
    dry_run: Annotated[bool, Parameter(help="Send nothing; print the exact count, by day.")] = False,
    by: By = None,
    output: Output = "text",
) -> ExitCode:
    """Send rows again that were sent before now, in order per key, with their message ids and x-replay-id.

    Ctrl-C stops it, and `relay replay resume` goes on. Next to live traffic it goes slowly, unless --rate says how
    fast.
    """
    filters.check(message_ids)
    target.check()
    settings = options.load().settings
    if not dry_run:
        asyncio.run(refuse_pooler(settings.database))  # before there is a job that would keep days from retention
    with session(settings.database, timeout=SCAN_TIMEOUT) as connection:
        schema = settings.database.schema_name
        selection = filters.selection(connection, message_ids)
        if dry_run:
            _tell_what_is_not_there(connection, schema, selection)
            return _print_count(connection, schema, selection, output)
        asyncio.run(check_target(settings.broker, target.to_exchange, target.routing_key))
        job = make_job(
            connection, schema, selection, by=by, to_exchange=target.to_exchange, routing_key=target.routing_key
        )
        # Now that the job keeps retention from dropping any day that is still there.
        _tell_what_is_not_there(connection, schema, selection)
    return _run(settings, job, rate, output)


@app.command
def resume(job: JobId, /, *, options: Options = Options(), rate: Rate = None, output: Output = "text") -> ExitCode:
    """Go on with a replay that was interrupted, behind the last saved row."""
    settings = options.load().settings
    asyncio.run(refuse_pooler(settings.database))
    with session(settings.database) as connection:
        found = _resumable(read_job(connection, settings.database.schema_name, job))
    return _run(settings, found, rate, output)


@app.command(name="list")
def list_(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    limit: Annotated[int, Parameter(help="At most so many.", validator=validators.Number(gte=1))] = 20,
    output: Output = "text",
) -> ExitCode:
    """List replays, the newest first."""
    jobs = options.operations().list_replays(limit=limit)
    if output == "json":
        print_json(jobs)
    else:
        print_table(LIST_COLUMNS, [_list_row(job) for job in jobs])
    return ExitCode.DONE


@app.command
def show(
    job: JobId,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    limit: Annotated[int, Parameter(help="At most so many failed rows.", validator=validators.Number(gte=1))] = 100,
    output: Output = "text",
) -> ExitCode:
    """Show one replay and the rows that it could not send."""
    shown = options.operations().show_replay(job, limit=limit)
    found, failures = shown.job, shown.failures
    if output == "json":
        print_json({"job": found, "failures": failures})
        return ExitCode.DONE
    print_pairs([(name.replace("_", " "), getattr(found, name)) for name in Job.__dataclass_fields__])
    if failures:
        print_table(("id", "message id", "reason"), [(each.id, each.message_id, each.reason) for each in failures])
    return ExitCode.DONE


@app.command
def cancel(
    job: JobId,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    consent: Consent = Consent(),
) -> ExitCode:
    """End a replay for good; a process that runs it stops within a second, or when its list is made."""
    consent.check()
    operations = options.operations()
    found = cancellable(operations.show_replay(job, limit=1).job)
    if consent.dry_run:
        show_loss(_loss(found))
        return ExitCode.DONE
    if not consent.is_given(lambda: _loss(found)):
        return ExitCode.FAILED
    ended = operations.cancel_replay(job, by=consent.operator, why=consent.reason)
    say(f"cancelled replay {ended.id}, of which {ended.replayed} rows were replayed")
    return ExitCode.DONE


def _loss(job: Job) -> Loss:
    done = f"{job.replayed + job.failed} of {'uncounted' if job.selected is None else job.selected} rows"
    return Loss(f"end replay {job.id} ({job.state}) for good, after {done}", job.made_at, [_list_row(job)])


def _resumable(job: Job) -> Job:
    if job.state == "running":
        raise BusyError(f"replay {job.id} is run by another process")
    if job.state != "interrupted":
        raise UsageError(f"replay {job.id} is {job.state}: there is nothing to resume")
    return job


def _tell_what_is_not_there(connection: psycopg.Connection, schema: str, selection: Selection) -> None:
    """Print on stderr which rows are not replayed: those that are no longer kept, and those not sent yet."""
    first = first_day(connection, schema)
    if first is not None and (selection.since is None or selection.since < first):
        aside(f"sent rows are kept from {first:%Y-%m-%d} (UTC) on; nothing older can be replayed")
    if selection.message_ids and selection.since is None and selection.until is None:
        for message_id, row in find_rows(connection, schema, selection.message_ids).items():
            if isinstance(row, Missing) or row.state != "sent":
                aside(f"{message_id} is not replayed: {row.words}")
        return
    waiting = count_waiting(connection, schema, selection)
    if selection.until is None and waiting.pending:
        aside(f"{waiting.pending} more rows match and are pending: they go out by themselves, and are not replayed")
    if selection.until is None and waiting.parked:
        aside(f"{waiting.parked} more rows match and are parked, never sent: `relay parked retry` sends them")


def _print_count(connection: psycopg.Connection, schema: str, selection: Selection, output: Output) -> ExitCode:
    days = count_by_day(connection, schema, selection)
    total = sum(day.rows for day in days)
    if output == "json":
        print_json({"rows": total, "days": days})
    else:
        print_table(("day", "rows"), [(day.day, day.rows) for day in days])
        say(f"would replay {total} rows")
    return ExitCode.DONE


def _run(settings: Settings, job: Job, rate: float | None, output: Output) -> ExitCode:
    started = time.monotonic()
    try:
        with shown_progress(settings.log, f"replay {job.id}", partial(_tell, job)) as show:
            end = uvloop.run(serve(settings, job, rate=rate, show=lambda told: show(_seen(told))))
    except OutboxError as error:
        if not isinstance(error, BusyError | PartlyDoneError):
            aside(_how_to_go_on(job))
        raise
    selected, replayed, failed = end.progress
    if output == "json":
        state = "done" if end.is_done else "interrupted"
        print_json({"id": job.id, "state": state, **end.progress._asdict()})
    elif not end.is_done:
        say(f"replay {job.id} stopped after {replayed + failed} of {selected or 'uncounted'} rows")
        aside(_how_to_go_on(job))
    elif not selected:
        say(f"no sent row matches: nothing to replay (replay {job.id})")
    else:
        say(f"replay {job.id} is done: {replayed} rows replayed in {time.monotonic() - started:.1f} s")
    if not end.is_done:
        return ExitCode.INTERRUPTED
    if gone := (selected or 0) - replayed - failed:
        complain(f"{gone} rows are gone: their days were dropped before they could be read")
    if failed:
        complain(f"{failed} rows could not be sent: `relay replay show {job.id}` tells which, and why")
    return ExitCode.FAILED if failed or gone else ExitCode.DONE


def _seen(progress: Progress) -> Seen:
    return Seen(progress.selected, progress.replayed + progress.failed, progress.failed)


def _tell(job: Job, seen: Seen) -> None:
    replayed = seen.done - seen.failed
    log.info("replay.progressed", replay=job.id, selected=seen.total, replayed=replayed, failed=seen.failed)


def _how_to_go_on(job: Job) -> str:
    return f"`relay replay resume {job.id}` goes on"


def _list_row(job: Job) -> tuple[object, ...]:
    given = ", ".join(f"{name}={_short(value)}" for name, value in job.filter.items()) or "all"
    counts = (job.selected, job.replayed, job.failed)
    return (job.id, job.state, utc(job.made_at), job.made_by, given, *counts, job.cancelled_by)


def _short(value: object) -> object:
    return f"{value[0]} and {len(value) - 1} more" if isinstance(value, list) and len(value) > 1 else value
