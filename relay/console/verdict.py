"""The state of the outbox in the words of the first page, with the way to each repair, the weightiest first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never
from urllib.parse import urlencode

from relay.console.checkup import CheckupReport
from relay.console.consumers import HeldBy, SeenConsumers
from relay.console.sampler import Sample
from relay.jobs.job import PausedJobs
from relay.operate.doctor.broker import REACHED
from relay.operate.doctor.consumers import CONSUMED
from relay.operate.doctor.finding import Verdict
from relay.operate.health import OutboxState
from relay.operate.runbooks import Runbook
from relay.operate.status import About, Reason


class Mood(StrEnum):
    """The colour of the verdict, or of a reason, the worst last."""

    UNKNOWN = "unknown"  # nothing was seen so far
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"

    @property
    def weight(self) -> int:
        return list(Mood).index(self)


@dataclass(frozen=True, slots=True)
class Repair:
    """A page where something is repaired."""

    path: str
    words: str


@dataclass(frozen=True, slots=True)
class Told:
    """A reason with its repair.

    Attributes:
        key: says what kind of reason it is, whatever its numbers are.
        headline: what the verdict says when this reason is the worst; empty where the outbox's state says it.
    """

    key: str
    words: str
    repair: Repair | None
    runbook: Runbook
    mood: Mood = Mood.WARNING
    headline: str = ""


@dataclass(frozen=True, slots=True)
class TheVerdict:
    """What an operator must know first."""

    mood: Mood
    words: str
    reasons: list[Told]


DOCTOR = Repair("/doctor", "See the doctor's list")
SEEN_HERE = {REACHED, CONSUMED}  # of the doctor's checks
# In the order of their weight.
REPAIRS = {
    About.RELAYS: Repair("/nodes", "Look at the relays"),
    About.SESSIONS: Repair("/doctor", "Run the doctor"),
    About.ROUTE: Repair("/routes", "See the route, and try it"),
    About.PARKED: Repair("/failures", "See what failed, and retry it"),
    About.REFUSED: Repair("/messages?state=pending", "See what waits"),
    About.PAUSE: Repair("/routes", "See what is paused, and resume it"),
}


def verdict(
    sample: Sample | None,
    report: CheckupReport | None = None,
    consumers: SeenConsumers | None = None,
    failing: Sequence[str] = (),
    *,
    unsent: str = "",
) -> TheVerdict:
    """Return what a sample, the doctor's latest report and the latest look at the consumers come to.

    Args:
        failing: tasks of the console that have failed of late.
        unsent: why the receiver of the webhook has not taken the latest change.
    """
    outbox = _of_sample(sample)
    if outbox.mood is Mood.UNKNOWN:
        return outbox
    told = [*_of_console(failing, unsent), *(_of_jobs(sample.paused) if sample else [])]
    told += _of_consumers(consumers) if consumers else []
    told += _of_report(report, known={each.words for each in [*outbox.reasons, *told]})
    reasons = sorted([*outbox.reasons, *told], key=lambda each: -each.mood.weight)
    worst = max(told, key=lambda each: each.mood.weight, default=None)
    if worst is None or worst.mood.weight <= outbox.mood.weight:
        return replace(outbox, reasons=reasons)
    return TheVerdict(worst.mood, f"Messages go out, and {worst.headline}", reasons)


def _of_sample(sample: Sample | None) -> TheVerdict:
    if sample is None:
        return TheVerdict(Mood.UNKNOWN, "Looking at the outbox…", [])
    if sample.status is None:
        repair = Repair("/doctor", "Run the doctor")
        told = [Told("database", sample.error or "", repair, Runbook.DATABASE_LOST, Mood.FAILED)]
        return TheVerdict(Mood.FAILED, "The database does not answer", told)
    status = sample.status
    state = OutboxState.STALLED if sample.sent_none else status.state
    is_stalled = state is OutboxState.STALLED
    reasons = [_told(each, is_stalled=is_stalled) for each in sorted(status.reasons, key=_weight)]
    match state:
        case OutboxState.OK:
            words = "All is well" if status.pending else "All is well, nothing waits"
            return TheVerdict(Mood.OK, words, reasons)
        case OutboxState.DEGRADED:
            return TheVerdict(Mood.WARNING, "Something needs a look; the rest goes out", reasons)
        case OutboxState.STALLED:
            return TheVerdict(Mood.FAILED, "Rows wait, and nothing goes out", reasons)
        case _:
            assert_never(state)


def _weight(reason: Reason) -> int:
    return list(REPAIRS).index(reason.about)


def _told(reason: Reason, *, is_stalled: bool) -> Told:
    stalls = is_stalled and reason.about in (About.RELAYS, About.ROUTE)
    mood = Mood.FAILED if stalls else Mood.WARNING
    return Told(reason.about, reason, REPAIRS[reason.about], reason.runbook, mood)


def _of_console(failing: Sequence[str], unsent: str) -> list[Told]:
    headline = "the console needs a look"
    told = [
        Told(
            f"task {name}",
            f"the console's task {name!r} has failed, and begins again: see its log",
            None,
            Runbook.CONSOLE,
            headline=headline,
        )
        for name in failing
    ]
    if unsent:
        words = f"the receiver of console.webhook_url has not taken the latest change: {unsent}"
        told.append(Told("webhook", words, None, Runbook.CONSOLE, headline=headline))
    return told


def _of_jobs(paused: PausedJobs) -> Iterator[Told]:
    headline = "a job is paused" if paused.total == 1 else f"{paused.total:,} jobs are paused"
    for job in paused.newest:
        words = f"job {job.id} ({job.kind}) is paused" + (f": {job.because}" if job.because else "")
        repair = Repair(f"/jobs/{job.id}", "See the job, and let it go on")
        yield Told(f"job {job.id}", words, repair, Runbook.PAUSED, headline=headline)
    if more := paused.total - len(paused.newest):
        words = f"{more:,} more {'job is' if more == 1 else 'jobs are'} paused"
        yield Told("jobs", words, Repair("/jobs", "See the jobs"), Runbook.PAUSED, headline=headline)


def _of_consumers(seen: SeenConsumers) -> Iterator[Told]:
    headline = "consumers need a look"
    for queue in seen.missing:
        words = f"there is no queue {queue}: `relay topology apply` declares what relay.toml lists"
        repair = Repair("/routes", "See where messages go")
        yield Told(f"queue {queue}", words, repair, Runbook.ROUTE, headline=f"there is no queue {queue}")
    for each in seen.queues:
        if (reason := each.reason) is not None:
            mood, said = (Mood.FAILED, f"nothing consumes {each.name}") if each.is_unread else (Mood.WARNING, headline)
            repair = Repair("/consumers", "See the consumers")
            yield Told(f"queue {each.name}", reason, repair, reason.runbook, mood, said)
    for queue, number in seen.letters.items():
        if number:
            words = f"{number:,} dead {'letter' if number == 1 else 'letters'} in {queue}"
            path = f"/failures?{urlencode({'queue': queue})}"
            repair = Repair(path, "See why, and retry them")
            yield Told(f"letters {queue}", words, repair, Runbook.CONSUMER_DEAD_LETTERS, headline=headline)
    for held in seen.held:
        if held.waiting or held.overdue:
            repair = Repair("/failures", "See why, and let it try now")
            key = f"held {held.consumer}"
            yield Told(key, _held_words(held), repair, Runbook.CONSUMER_HELD, headline=headline)
    for reason in seen.reasons:
        yield Told("pools", reason, Repair("/nodes", "Look at the pools"), reason.runbook, headline=headline)


def _held_words(held: HeldBy) -> str:
    words = f"consumer {held.consumer} holds {held.messages:,} {'message' if held.messages == 1 else 'messages'}"
    words += f" of {held.keys:,} {'key' if held.keys == 1 else 'keys'}"
    return f"{words}, and does not try them: start it" if held.overdue == held.keys else words


def _of_report(report: CheckupReport | None, known: set[str]) -> list[Told]:
    """Return what the doctor has found, but for what others tell.

    The sample tells of each route in quarantine, and the look at the consumers of each queue. They know within seconds
    when it works again.
    """
    findings = report.findings if report else ()
    return [
        Told(
            f"doctor {each.check}",
            f"{each.words}: {each.remedy}" if each.remedy else each.words,
            DOCTOR,
            Runbook.DOCTOR,
            headline="the doctor has found something",
        )
        for each in findings
        if each.verdict is Verdict.FAILED and each.check not in SEEN_HERE and each.words not in known
    ]
