"""`relay jobs`."""

import time
from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.consent import Audit, Consent, Loss, show_loss
from relay.cli.exit_code import ExitCode
from relay.cli.job_runs import (
    Rate,
    report_job,
    report_rows,
    run_letters_job,
    run_replay,
    shown_rows,
)
from relay.cli.operations import RemoteDatabaseOptions, RemoteOptions
from relay.cli.options import Most, Output
from relay.cli.printing import print_json, print_pairs, print_table, say
from relay.errors import UsageError
from relay.jobs.job import Job, Kind, Source, cancellable, resume_job
from relay.jobs.words import how_far, outcome_of, speed_words, state_of
from relay.observe.log import keep_libraries_quiet
from relay.observe.printable import utc
from relay.operate import jobs
from relay.operate.bulk import run
from relay.operate.session import session

LIST_COLUMNS = (
    "id", "kind", "source", "state", "made at", "made by", "filter", "selected", "done", "failed", "why", "outcome",
)  # fmt: skip

UNSAID = ("run_seconds", "began_with")  # fields of a job that its speed tells

app = App(name="jobs", help="List, show, pause, resume and cancel bulk work: replays, retries, discards and others.")

JobId = Annotated[int, Parameter(help="Its number.")]


@app.command(name="list")
def list_(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    kind: Annotated[Kind | None, Parameter(help="Only of this kind.")] = None,
    limit: Most = 20,
    output: Output = "text",
) -> ExitCode:
    """List jobs, the newest first."""
    found = options.operations().do(jobs.list_, jobs.ListJobs.model_construct(kind=kind, limit=limit)).rows
    if output == "json":
        print_json(found)
    else:
        print_table(LIST_COLUMNS, [_list_row(job) for job in found], wide={"why"})
    return ExitCode.DONE


@app.command
def show(
    job: JobId,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    limit: Most = 100,
    output: Output = "text",
) -> ExitCode:
    """Show one job, and the rows that failed in it."""
    shown = options.operations().do(jobs.show, jobs.ShowJob.model_construct(job=job, limit=limit))
    found, failures = shown.job, shown.failures
    if output == "json":
        print_json({"job": found, "failures": failures})
        return ExitCode.DONE
    print_pairs(_pairs(found))
    if failures:
        print_table(("id", "message id", "reason"), [(each.id, each.message_id, each.reason) for each in failures])
    return ExitCode.DONE


@app.command
def resume(
    job: JobId,
    /,
    *,
    options: RemoteOptions = RemoteOptions(),
    audit: Audit = Audit(),
    rate: Rate = None,
    output: Output = "text",
) -> ExitCode:
    """Go on with a job that was interrupted or paused, behind what it has saved. --rate is for replays."""
    if options.server:
        if rate is not None:
            raise UsageError("--rate: a console goes on with the rate that the job was ordered with")
        return _have_resumed(options, job, audit, output)
    keep_libraries_quiet()
    settings = options.load().settings
    with session(settings.database) as tables:
        found = resume_job(tables, job, by=audit.operator, why=audit.reason or None)
    match found.source:
        case Source.SENT:
            return run_replay(settings, found, rate, output)
        case Source.DEAD_LETTER:
            return run_letters_job(settings, found, output)
        case Source.PARKED | Source.ARCHIVED | Source.DISCARDED | Source.QUARANTINED:
            with shown_rows(settings.log, found.words) as shown:
                found = run(settings, found, show=shown)
            return report_rows(found, output)


def _have_resumed(options: RemoteOptions, job: int, audit: Audit, output: Output) -> ExitCode:
    """Have a console go on with a job that was ordered of it."""
    started = time.monotonic()
    with shown_rows(options.log_settings(), f"job {job}") as show:
        asked = jobs.TurnJob.model_construct(job=job, why=audit.reason)
        _, found = options.operations().finish(jobs.resume, asked, by=audit.operator, show=show)
    return report_job(found, output, seconds=time.monotonic() - started)


@app.command
def pause(
    job: JobId, /, *, options: RemoteDatabaseOptions = RemoteDatabaseOptions(), audit: Audit = Audit()
) -> ExitCode:
    """Pause a job; a process that runs it stops within a second, or when its list is made."""
    asked = jobs.TurnJob.model_construct(job=job, why=audit.reason)
    found = options.operations().do(jobs.pause, asked, by=audit.operator)
    say(f"paused {found.words} after {found.done} of {_selected(found)} rows")
    return ExitCode.DONE


@app.command
def cancel(
    job: JobId,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    consent: Consent = Consent(),
) -> ExitCode:
    """End a job for good; a process that runs it stops within a second, or when its list is made."""
    consent.check()
    operations = options.operations()
    found = cancellable(operations.do(jobs.show, jobs.ShowJob.model_construct(job=job, limit=1)).job)
    if consent.dry_run:
        show_loss(_loss(found))
        return ExitCode.DONE
    if not consent.is_given(lambda: _loss(found)):
        return ExitCode.FAILED
    asked = jobs.CancelJob.model_construct(job=job, why=consent.reason)
    ended = operations.do(jobs.cancel, asked, by=consent.operator)
    say(f"cancelled {ended.words}, of which {ended.done} rows are done")
    return ExitCode.DONE


def _loss(job: Job) -> Loss:
    done = f"{job.done} of {_selected(job)} rows"
    return Loss(f"end {job.words} ({job.state}) for good, after {done}", job.made_at, [_list_row(job)])


def _selected(job: Job) -> object:
    return "uncounted" if job.selected is None else job.selected


def _pairs(job: Job) -> list[tuple[str, object]]:
    words = [("how far", how_far(job)), ("speed", speed_words(job)), ("outcome", outcome_of(job))]
    fields = [(name, getattr(job, name)) for name in Job.__dataclass_fields__ if name not in UNSAID]
    said = [(name.replace("_", " "), state_of(job) if name == "state" else value) for name, value in fields]
    return [*said, *words]


def _list_row(job: Job) -> tuple[object, ...]:
    given = ", ".join(f"{name}={_short(value)}" for name, value in job.filter.items() if value) or "all"
    counts = (job.selected, job.done, job.failed)
    made = (utc(job.made_at), job.made_by)
    return (job.id, job.kind, job.source, state_of(job), *made, given, *counts, job.why, outcome_of(job))


def _short(value: object) -> object:
    return f"{value[0]} and {len(value) - 1} more" if isinstance(value, list) and len(value) > 1 else value
