"""Run a job with parked rows in the foreground, and tell how it ended: for `relay parked` and `relay jobs resume`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psycopg

from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.options import Output
from relay.cli.printing import aside, complain, counted, print_json, say
from relay.cli.progress import Seen, shown_progress
from relay.config.settings import Settings
from relay.jobs.job import Job, JobKind, JobState
from relay.logger import get_logger
from relay.operate.release import Done, run_release
from relay.stopping import STOPS

BULK_TIMEOUT = 600.0  # seconds for a statement: one head may have a million rows behind it
PAST = {
    JobKind.RETRY: "retried",
    JobKind.DISCARD: "discarded",
    JobKind.ARCHIVE: "archived",
    JobKind.RESTORE: "restored",
}

log = get_logger(__name__)


def run_rows(connection: psycopg.Connection, settings: Settings, job: Job, output: Output) -> ExitCode:
    """Run a job until its end or a signal, and print what it did."""
    schema = settings.database.schema_name
    with (
        stopped_by_signals() as stopping,
        shown_progress(settings.log, job.name, partial(_tell, job)) as show,
    ):
        done = run_release(
            connection, schema, job, stopping=stopping, show=lambda at: show(Seen(at.selected, at.done, at.failed))
        )
    return _report(done, output)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield the event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield stopping
        return
    before = {number: signal.getsignal(number) for number in STOPS}

    def stop(number: int, _: object) -> None:
        signal.signal(number, before[signal.Signals(number)])
        stopping.set()

    for number in STOPS:
        signal.signal(number, stop)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(done: Done, output: Output) -> ExitCode:
    job = done.job
    assert job is not None, "what was run has a job"  # noqa: S101
    if output == "json":
        print_json(
            {
                "chosen": done.chosen,
                "released": done.released,
                "not_found": done.not_found,
                "job": job.id,
                "state": job.state,
            }
        )
    else:
        behind = "it" if done.chosen == 1 else "them"
        released = "" if job.kind is JobKind.RESTORE else f", and released {done.released} held behind {behind}"
        say(f"{PAST[job.kind]} {counted(done.chosen, 'row')}{released}")
    for reason in done.not_found:
        complain(reason)
    if job.state is not JobState.DONE:
        return unfinished(job)
    return exit_code(done=done.chosen, left=len(done.not_found))


def unfinished(job: Job) -> ExitCode:
    """Tell why a job is not at its end."""
    left = f"after {job.done + job.failed if job.kind is JobKind.REPLAY else job.done} of {job.selected} rows"
    match job.state:
        case JobState.CANCELLED:
            complain(f"{job.name} was cancelled {left}")
            return ExitCode.PARTLY
        case JobState.PAUSED:
            why = f": {job.paused_why}" if job.paused_why else ""
            complain(f"{job.name} is paused {left}{why}; {how_to_go_on(job)}")
            return ExitCode.PARTLY
        case _:
            aside(f"{job.name} stopped {left}; {how_to_go_on(job)}")
            return ExitCode.INTERRUPTED


def how_to_go_on(job: Job) -> str:
    """Return the command that goes on with a job."""
    return f"`relay jobs resume {job.id}` goes on"


def _tell(job: Job, seen: Seen) -> None:
    log.info("job.progressed", job=job.id, kind=job.kind, selected=seen.total, done=seen.done, failed=seen.failed)
