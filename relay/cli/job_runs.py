"""Run a job as a command does: with its progress, and with words for how it ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from cyclopts import Parameter, validators

from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.options import Output
from relay.cli.printing import aside, complain, counted, print_json, say
from relay.cli.progress import SeenProgress, shown_progress
from relay.config.settings import LogSettings, Settings
from relay.errors import BusyError, OutboxError, PartlyDoneError, UsageError
from relay.jobs.job import BELOW_RATE, LEAST_RATE, Caution, Job, JobState, Kind, Source
from relay.jobs.words import outcome_of
from relay.logger import get_logger
from relay.operate.bulk import run, run_letters
from relay.operate.letters.audit import AuditEntry
from relay.operate.letters.read import list_command
from relay.operate.letters.work import LettersDone, done_by_console, entry_of
from relay.operate.letters.work import Show as ShowLetters

log = get_logger(__name__)

Rate = Annotated[
    float | None,
    Parameter(help="Messages a second, at most.", validator=validators.Number(gte=LEAST_RATE, lt=BELOW_RATE)),
]
PAST = {Kind.RETRY: "retried", Kind.DISCARD: "discarded", Kind.ARCHIVE: "archived", Kind.RESTORE: "restored"}
LAST_STAGE = "all"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Careful:
    """How carefully a job goes on."""

    rate: Rate = None
    stages: Annotated[
        str | None, Parameter(help="Wait for the outcome after so many messages in all, such as 1,10,100,all.")
    ] = None
    stop_when_failing: Annotated[
        str | None, Parameter(help="Pause when more than this share of a stage fails, such as 5%.")
    ] = None

    def caution(self) -> Caution:
        """Return what the flags say.

        Raises:
            UsageError: one of them cannot be read, or they do not fit together.
        """
        stages = _stages(self.stages) if self.stages is not None else ()
        share = None if self.stop_when_failing is None else _share(self.stop_when_failing)
        if share is not None and not stages:
            raise UsageError("--stop-when-failing needs --stages, such as --stages 1,10,100,all")
        return Caution(rate=self.rate, stages=stages, stop_when_failing=share)


def _stages(text: str) -> tuple[int, ...]:
    *numbers, last = text.split(",")
    counts = tuple(int(each) for each in numbers if each.isascii() and each.isdecimal())
    is_rising = list(counts) == sorted({*counts}) and 0 not in counts
    if last != LAST_STAGE or not counts or len(counts) != len(numbers) or not is_rising:
        raise UsageError(f"--stages takes rising numbers and then all, such as 1,10,100,all; not {text!r}")
    return counts


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1
    if not text.endswith("%") or not 0 <= share <= 1:
        raise UsageError(f"--stop-when-failing takes a share such as 5%, from 0% to 100%; not {text!r}")
    return share


@contextmanager
def shown_rows(log_settings: LogSettings, title: str) -> Iterator[Callable[[Job], None]]:
    """Yield the function that shows how far a job over rows is; a stop by Ctrl-C says how to go on."""
    last: list[Job] = []
    shown: list[Callable[[SeenProgress], None]] = []

    def tell(seen: SeenProgress) -> None:
        log.info(
            "job.progressed",
            job=last[0].id,
            kind=str(last[0].kind),
            rows=seen.total,
            done=seen.done,
            failed=seen.failed,
        )

    with ExitStack() as stack:

        def show_job(job: Job) -> None:
            if not last:  # what fails before it begins is told as by any command
                shown.append(stack.enter_context(shown_progress(log_settings, title, tell)))
            last[:] = [job]
            shown[0](SeenProgress(job.selected, job.done, job.failed))

        try:
            yield show_job
        except KeyboardInterrupt:
            if last:
                aside(how_to_go_on(last[0].id))
            raise


def behind_words(chosen: int, released: int) -> str:
    """Return how many rows go from behind the chosen ones: "1 held behind it"."""
    return f"{released} held behind {'it' if chosen == 1 else 'them'}"


def changed_words(job: Job) -> str:
    """Return what a job over rows has done until now."""
    goes_alone = job.kind is Kind.RESTORE or job.source is Source.QUARANTINED
    released = "" if goes_alone else f", and released {behind_words(job.done, job.released)}"
    return f"{PAST[job.kind]} {counted(job.done, 'row')}{released}"


def report_job(job: Job, output: Output, *, seconds: float) -> ExitCode:
    """Print what a job has done that a console has run, and return the exit code."""
    match job.source:
        case Source.SENT:
            return report_replay(job, output, seconds=seconds)
        case Source.DEAD_LETTER:
            return report_letters(done_by_console(job), entry_of(job), output)
        case Source.PARKED | Source.ARCHIVED | Source.DISCARDED | Source.QUARANTINED:
            return report_rows(job, output)


def report_rows(job: Job, output: Output) -> ExitCode:
    """Print what a job over rows has done, and return the exit code."""
    if output == "json":
        print_json(job)
    else:
        say(changed_words(job))
    return how_it_ended(job)


def how_it_ended(job: Job) -> ExitCode:
    """Return the exit code of a job over rows, and tell what an operator should know of its end."""
    match job.state:
        case JobState.DONE:
            return _how_it_came_out(job)
        case JobState.INTERRUPTED:
            aside(how_to_go_on(job.id))
            return ExitCode.INTERRUPTED
        case JobState.PAUSED:
            complain(f"{job.words} is paused: {job.paused_because}")
            aside(how_to_go_on(job.id))
        case JobState.WAITING | JobState.RUNNING | JobState.CANCELLED:
            complain(f"{job.words} is {job.state}")
    return ExitCode.PARTLY


def _how_it_came_out(job: Job) -> ExitCode:
    """Return the exit code of a job over rows that is done, and tell what became of them."""
    outcome = outcome_of(job)
    if job.failed:
        complain(f"{outcome}: `relay jobs show {job.id}` tells which, and why")
        return ExitCode.FAILED
    if job.waiting:
        aside(f"{outcome}: `relay status` tells why")
    elif outcome is not None:
        aside(outcome)
    return ExitCode.DONE


def how_to_go_on(job: int | None) -> str:
    """Return which command goes on with a job."""
    return f"`relay jobs resume {job}` goes on"


def run_replay(settings: Settings, job: Job, rate: float | None, output: Output) -> ExitCode:
    """Send the rest of a replay, and print what was done."""
    started = time.monotonic()
    try:
        with shown_progress(settings.log, f"replay {job.id}", partial(_tell_replay, job)) as show:
            job = run(settings, job, rate=rate, show=lambda told: show(_seen(told)))
    except OutboxError as error:
        if not isinstance(error, BusyError | PartlyDoneError):
            aside(how_to_go_on(job.id))
        raise
    return report_replay(job, output, seconds=time.monotonic() - started)


def report_replay(job: Job, output: Output, *, seconds: float) -> ExitCode:
    """Print what a replay has done, and return the exit code."""
    selected, done, failed = job.selected, job.done, job.failed
    if output == "json":
        print_json({"id": job.id, "state": job.state, "selected": selected, "done": done, "failed": failed})
    elif job.state is not JobState.DONE:
        say(f"{job.words} is {job.state} after {done + failed} of {selected or 'uncounted'} rows")
        if job.state is not JobState.CANCELLED:
            aside(how_to_go_on(job.id))
    elif not selected:
        say(f"no sent row matches: nothing to replay ({job.words})")
    else:
        say(f"{job.words} is done: {done} rows replayed in {seconds:.1f} s")
    if job.state is JobState.INTERRUPTED:
        return ExitCode.INTERRUPTED
    gone = (selected or 0) - done - failed if job.state is JobState.DONE else 0
    if gone:
        complain(f"{gone} rows are gone: their days were dropped before they could be read")
    if failed:
        complain(f"{failed} rows could not be sent: `relay jobs show {job.id}` tells which, and why")
    if job.state is not JobState.DONE:
        return ExitCode.PARTLY
    return ExitCode.FAILED if failed or gone else ExitCode.DONE


@contextmanager
def shown_letters(log_settings: LogSettings, entry: AuditEntry) -> Iterator[ShowLetters]:
    """Yield the function that shows how far a job over dead letters is."""

    def tell(seen: SeenProgress) -> None:
        log.info(
            "dead_letters.progressed",
            command=entry.command,
            queue=entry.queue,
            letters=seen.total,
            read=seen.done,
            refused=seen.failed,
        )

    with shown_progress(log_settings, f"{entry.command} {entry.queue}", tell) as show:
        yield lambda *seen: show(SeenProgress(*seen))


def run_letters_job(settings: Settings, job: Job, output: Output) -> ExitCode:
    """Do the rest of a job over dead letters, and print what was done."""
    entry = entry_of(job)
    with shown_letters(settings.log, entry) as show:
        done = run_letters(settings, job, show=show)
    return report_letters(done, entry, output)


def report_letters(done: LettersDone, entry: AuditEntry, output: Output, *, is_preview: bool = False) -> ExitCode:
    """Print what was done with dead letters, or would be, and return the exit code."""
    target = f" into {entry.sent_to}" if entry.sent_to else ""
    if output == "json":
        print_json(done)
    elif is_preview:
        say(f"would {entry.command} {counted(done.done, 'letter')} of {done.queue}{target}")
    else:
        past = "sent" if entry.command == Kind.RETRY else "threw away"
        say(f"{past} {counted(done.done, 'letter')} of {done.queue}{target}")
    for message_id, reason in done.refused:
        complain(f"{message_id or 'a letter without a message id'} stays: {reason}")
    for message_id in done.not_found:
        complain(f"{message_id} is not there, or is with another consumer: see {list_command(done.queue)}")
    warn_of_returns(done.warning)
    if done.paused_because is not None:
        complain(f"job {done.job} is paused: {done.paused_because}")
        aside(how_to_go_on(done.job))
        return ExitCode.PARTLY
    if left := len(done.refused) + len(done.not_found):
        return exit_code(done=done.done, left=left)
    if done.is_stopped:
        aside(f"stopped: {how_to_go_on(done.job)}")
        return ExitCode.INTERRUPTED
    if done.failed_again:
        complain(f"letters that failed while stages were tried: {done.failed_again}; see {list_command(done.queue)}")
        return ExitCode.FAILED
    if done.unwatched:
        aside(f"{counted(done.unwatched, 'letter')} not watched: {list_command(done.queue)} tells what failed again")
    return ExitCode.DONE


def warn_of_returns(warning: str | None) -> None:
    """Complain that letters have come back often, where they could not be put in again."""
    if warning:
        complain(
            "letters have come back so often that a delivery limit of their queue may drop them. They could not be put"
            f" in again: {warning}; docs/dead-letters.md tells what to do"
        )


def _seen(job: Job) -> SeenProgress:
    return SeenProgress(job.selected, job.done + job.failed, job.failed)


def _tell_replay(job: Job, seen: SeenProgress) -> None:
    replayed = seen.done - seen.failed
    log.info("replay.progressed", replay=job.id, selected=seen.total, replayed=replayed, failed=seen.failed)
