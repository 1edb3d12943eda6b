"""The state of the outbox in the words of the first page, with the way to each repair."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never
from urllib.parse import urlencode

from relay.console.checkup import Report
from relay.console.consumers import HeldBy, Seen
from relay.console.sampler import Sample
from relay.operate.doctor.broker import REACHED
from relay.operate.doctor.finding import Verdict
from relay.operate.health import OutboxState
from relay.operate.status import About, Reason


class Mood(StrEnum):
    """The colour of the verdict."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Repair:
    """A page where something is repaired."""

    path: str
    words: str


@dataclass(frozen=True, slots=True)
class Told:
    """A reason with its repair."""

    words: str
    repair: Repair | None


@dataclass(frozen=True, slots=True)
class TheVerdict:
    """What an operator must know first."""

    mood: Mood
    words: str
    reasons: list[Told]


DOCTOR = Repair("/doctor", "See the doctor's list")
REPAIRS = {
    About.RELAYS: Repair("/nodes", "Look at the relays"),
    About.REFUSED: Repair("/messages?state=pending", "See what waits"),
    About.PARKED: Repair("/failures", "See what failed, and retry it"),
    About.ROUTE: Repair("/routes", "See the route, and try it"),
    About.PAUSE: Repair("/routes", "See what is paused, and resume it"),
    About.SESSIONS: Repair("/doctor", "Run the doctor"),
}


def verdict(
    sample: Sample | None,
    report: Report | None = None,
    consumers: Seen | None = None,
    failing: Sequence[str] = (),
) -> TheVerdict:
    """Return what a sample, the doctor's latest report and the latest look at the consumers come to.

    Args:
        failing: tasks of the console that have failed of late.
    """
    seen = _with_failing(_of_sample(sample), failing)
    told = _of_consumers(consumers) if consumers else []
    if told and seen.mood is Mood.OK:
        seen = TheVerdict(Mood.WARNING, "Messages go out, and consumers need a look", seen.reasons)
    return _with_report(replace(seen, reasons=[*seen.reasons, *told]), report)


def _with_report(seen: TheVerdict, report: Report | None) -> TheVerdict:
    # The sample tells of each route in quarantine itself, and knows a second later when it works again.
    failed = (
        [each for each in report.findings if each.verdict is Verdict.FAILED and each.check != REACHED] if report else []
    )
    if not failed:
        return seen
    known = {each.words for each in seen.reasons}  # some the status tells, too
    told = [
        Told(f"{each.words}: {each.remedy}" if each.remedy else each.words, DOCTOR)
        for each in failed
        if each.words not in known
    ]
    if seen.mood is Mood.OK:
        return TheVerdict(Mood.WARNING, "Messages go out, and the doctor has found something", [*seen.reasons, *told])
    return replace(seen, reasons=[*seen.reasons, *told])


def _with_failing(seen: TheVerdict, failing: Sequence[str]) -> TheVerdict:
    told = [Told(f"the console's task {name!r} has failed, and begins again: see its log", None) for name in failing]
    if told and seen.mood is Mood.OK:
        return TheVerdict(Mood.WARNING, "Messages go out, and the console needs a look", [*seen.reasons, *told])
    return replace(seen, reasons=[*seen.reasons, *told])


def _of_sample(sample: Sample | None) -> TheVerdict:
    if sample is None:
        return TheVerdict(Mood.WARNING, "Looking at the outbox…", [])
    if sample.status is None:
        told = [Told(sample.error or "", Repair("/doctor", "Run the doctor"))]
        return TheVerdict(Mood.FAILED, "The database does not answer", told)
    status = sample.status
    told = [Told(reason, _repair(reason)) for reason in status.reasons]
    match status.state:
        case OutboxState.OK:
            words = "All is well" if status.pending else "All is well, nothing waits"
            return TheVerdict(Mood.OK, words, told)
        case OutboxState.DEGRADED:
            return TheVerdict(Mood.WARNING, "Something needs a look; the rest goes out", told)
        case OutboxState.STALLED:
            return TheVerdict(Mood.FAILED, "Rows wait, and nothing goes out", told)
        case _:
            assert_never(status.state)


def _of_consumers(seen: Seen) -> list[Told]:
    letters = [
        Told(
            f"{number:,} dead {'letter' if number == 1 else 'letters'} in {queue}",
            Repair(f"/failures?{urlencode({'queue': queue})}", "See why, and retry them"),
        )
        for queue, number in seen.letters.items()
        if number
    ]
    held = [
        Told(_held_words(each), Repair("/failures", "See why, and let it try now"))
        for each in seen.held
        if each.waiting or each.overdue
    ]
    return [*letters, *held, *(Told(reason, Repair("/nodes", "Look at the pools")) for reason in seen.reasons)]


def _held_words(held: HeldBy) -> str:
    words = f"consumer {held.consumer} holds {held.messages:,} {'message' if held.messages == 1 else 'messages'}"
    words += f" of {held.keys:,} {'key' if held.keys == 1 else 'keys'}"
    return f"{words}, and does not try them: start it" if held.overdue == held.keys else words


def _repair(reason: Reason) -> Repair:
    return REPAIRS[reason.about]
