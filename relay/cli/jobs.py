"""`relay jobs`."""

import asyncio
from typing import Annotated

from cyclopts import App, Parameter, validators

from relay.cli.consent import Audit, Consent, Loss, show_loss
from relay.cli.exit_code import ExitCode
from relay.cli.options import DatabaseOptions, Options, Output, Rate
from relay.cli.printing import print_json, print_pairs, print_table, say
from relay.cli.replaying import run_replay
from relay.cli.running import BULK_TIMEOUT, run_rows
from relay.database import refuse_pooler
from relay.jobs.job import (
    Job,
    JobKind,
    cancel_job,
    cancellable,
    list_failures,
    list_jobs,
    pause_job,
    read_job,
    resume_job,
)
from relay.observe.printable import utc
from relay.operate.session import session

LIST_COLUMNS = ("id", "kind", "state", "made at", "made by", "filter", "selected", "done", "failed", "why")

app = App(name="jobs", help="See, pause, resume or cancel retries, discards, archives, restores and replays.")

JobId = Annotated[int, Parameter(help="Its number.", validator=validators.Number(gte=1, lt=2**31))]


@app.command(name="list")
def list_(
    *,
    options: DatabaseOptions = DatabaseOptions(),
    limit: Annotated[int, Parameter(help="At most so many.", validator=validators.Number(gte=1))] = 20,
    output: Output = "text",
) -> ExitCode:
    """List jobs, the newest first."""
    database = options.load().settings.database
    with session(database) as connection:
        jobs = list_jobs(connection, database.schema_name, limit=limit)
    if output == "json":
        print_json(jobs)
    else:
        print_table(LIST_COLUMNS, [_list_row(job) for job in jobs], wide={"why"})
    return ExitCode.DONE


@app.command
def show(
    job: JobId,
    /,
    *,
    options: DatabaseOptions = DatabaseOptions(),
    limit: Annotated[int, Parameter(help="At most so many failed rows.", validator=validators.Number(gte=1))] = 100,
    output: Output = "text",
) -> ExitCode:
    """Show one job, and the rows that a replay could not send."""
    database = options.load().settings.database
    with session(database) as connection:
        found = read_job(connection, database.schema_name, job)
        failures = list_failures(connection, database.schema_name, job, limit=limit)
    if output == "json":
        print_json({"job": found, "failures": failures})
        return ExitCode.DONE
    print_pairs([(name.replace("_", " "), getattr(found, name)) for name in Job.__dataclass_fields__])
    if failures:
        print_table(("id", "message id", "reason"), [(each.id, each.message_id, each.reason) for each in failures])
    return ExitCode.DONE


@app.command
def pause(job: JobId, /, *, options: DatabaseOptions = DatabaseOptions(), audit: Audit = Audit()) -> ExitCode:
    """Let a job do no more until it is resumed; a process that runs it stops."""
    database = options.load().settings.database
    with session(database) as connection:
        paused = pause_job(connection, database.schema_name, job, by=audit.operator, why=audit.reason or None)
    say(f"paused {paused.name}, of which {paused.done} rows were done")
    return ExitCode.DONE


@app.command
def resume(
    job: JobId,
    /,
    *,
    options: Options = Options(),
    audit: Audit = Audit(),
    rate: Rate = None,
    output: Output = "text",
) -> ExitCode:
    """Go on with a job that was interrupted or paused, behind the last row that is done."""
    settings = options.load().settings
    database = settings.database
    with session(database, timeout=BULK_TIMEOUT) as connection:
        found = read_job(connection, database.schema_name, job)
        if found.kind is JobKind.REPLAY:
            asyncio.run(refuse_pooler(database))
        found = resume_job(
            connection, database.schema_name, job, by=audit.operator, why=audit.reason or None, rate=rate
        )
        if found.kind is not JobKind.REPLAY:
            return run_rows(connection, settings, found, output)
    return run_replay(settings, found, output)


@app.command
def cancel(job: JobId, /, *, options: DatabaseOptions = DatabaseOptions(), consent: Consent = Consent()) -> ExitCode:
    """End a job for good; a process that runs it stops. What is done stays done."""
    consent.check()
    database = options.load().settings.database
    with session(database) as connection:
        found = cancellable(read_job(connection, database.schema_name, job))
        if consent.dry_run:
            show_loss(_loss(found))
            return ExitCode.DONE
        if not consent.is_given(lambda: _loss(found)):
            return ExitCode.FAILED
        ended = cancel_job(connection, database.schema_name, job, by=consent.operator, why=consent.reason)
    say(f"cancelled {ended.name}, of which {ended.done} rows were done")
    return ExitCode.DONE


def _loss(job: Job) -> Loss:
    done = f"{job.done} of {'uncounted' if job.selected is None else job.selected} rows"
    return Loss(f"end {job.name}, which is {job.state}, for good, after {done}", job.made_at, [_list_row(job)])


def _list_row(job: Job) -> tuple[object, ...]:
    given = ", ".join(f"{name}={_short(value)}" for name, value in job.filter.items()) or "all"
    counts = (job.selected, job.done, job.failed)
    why = job.cancelled_why or job.paused_why or job.why
    return (job.id, job.kind, job.state, utc(job.made_at), job.made_by, given, *counts, why)


def _short(value: object) -> object:
    return f"{value[0]} and {len(value) - 1} more" if isinstance(value, list) and len(value) > 1 else value
