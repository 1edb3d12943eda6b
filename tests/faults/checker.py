"""The judge of every drill. It uses no code of the relay. It reads the history, which was written outside of the
relay. It reads the table with its own SQL, and the queues with its own AMQP reader.

    checker = Checker(history, database_url, broker_url, ["witness"])
    findings = await checker.ask(within=60)       # after everything is healed
    assert_valid(findings, Invariant.NOTHING_LOST, Invariant.IN_ORDER)

A verdict is valid only if everything was looked at: while rows wait, what is not invalid is unknown and is
asked again. What a run has no data for stays unknown, and a drill that claims it fails.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import LiteralString

from tests.faults import delivery, owners, sending
from tests.faults import delivery_path as course
from tests.faults.evidence import Delivered, Evidence, NoDataError, drain, is_settled, read_ids, read_table
from tests.faults.history import History


class Verdict(StrEnum):
    VALID = "valid"
    INVALID = "invalid"
    UNKNOWN = "unknown"  # not drained, or no data: never passed


class Invariant(StrEnum):
    """What must hold whatever fails."""

    NOTHING_LOST = "I1 nothing lost"
    NOTHING_INVENTED = "I2 nothing invented"
    SENT_IS_CONFIRMED = "I3 sent means confirmed"
    IN_ORDER = "I4 order per key"
    REPEATS_ARE_THE_SAME = "I5 repeats are the same message"
    NO_ATTEMPT_BURNT = "I7 no attempt burnt by an outage"
    ONE_OWNER = "I8 one owner a lane"
    PROGRESS = "I9 the rate comes back by itself"
    INNOCENT_KEYS = "I10 innocent keys go on"
    TRUTHFUL_READINESS = "I11 readiness tells the truth"
    BOUNDED = "I12 memory and transactions are bounded"


# What a run can claim that has the recording proxy next to the broker.
SENDING = (
    Invariant.NOTHING_LOST,
    Invariant.NOTHING_INVENTED,
    Invariant.SENT_IS_CONFIRMED,
    Invariant.IN_ORDER,
    Invariant.REPEATS_ARE_THE_SAME,
    Invariant.NO_ATTEMPT_BURNT,
)

# Each gives what violates the invariant, and raises NoDataError when the run cannot tell.
RULES: dict[Invariant, Callable[[Evidence], Iterator[str]]] = {
    Invariant.NOTHING_LOST: delivery.lost,
    Invariant.NOTHING_INVENTED: delivery.invented,
    Invariant.SENT_IS_CONFIRMED: sending.unconfirmed,
    Invariant.IN_ORDER: delivery.reordered,
    Invariant.REPEATS_ARE_THE_SAME: delivery.changed,
    Invariant.NO_ATTEMPT_BURNT: sending.burnt,
    Invariant.ONE_OWNER: owners.shared,
    Invariant.PROGRESS: course.slower,
    Invariant.INNOCENT_KEYS: course.delayed,
    Invariant.TRUTHFUL_READINESS: course.untruthful,
    Invariant.BOUNDED: course.unbounded,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict, and each violation or what is missing for one."""

    verdict: Verdict
    words: Sequence[str] = field(default_factory=tuple)


Findings = Mapping[Invariant, Finding]


def judge(evidence: Evidence) -> Findings:
    """Return a verdict on each invariant."""
    return {invariant: _find(rule, evidence) for invariant, rule in RULES.items()}


def assert_valid(findings: Findings, *invariants: Invariant) -> None:
    """Fail, with all findings, if one of these invariants or any other that was judged is not valid."""
    bad = [
        invariant
        for invariant, finding in findings.items()
        if finding.verdict is Verdict.INVALID or (invariant in invariants and finding.verdict is Verdict.UNKNOWN)
    ]
    assert not bad, report(findings, bad)


def invalid(findings: Findings) -> set[Invariant]:
    return {invariant for invariant, finding in findings.items() if finding.verdict is Verdict.INVALID}


def report(findings: Findings, invariants: Iterable[Invariant], at_most: int = 20) -> str:
    """Return the findings as lines: the first of them in full, and how many there are."""
    lines = []
    for invariant in invariants:
        finding = findings[invariant]
        lines.append(f"{invariant}: {finding.verdict}, {len(finding.words)}")
        lines += [f"    {words}" for words in finding.words[:at_most]]
    return "\n".join(lines)


def differences(written: Iterable[tuple[object, ...]], projected: Iterable[tuple[object, ...]]) -> list[str]:
    """Return each row that one end has and the other lacks, or has less often."""
    left, right = Counter(written), Counter(projected)
    return [
        *(f"{row} is written, not projected" for row in (left - right).elements()),
        *(f"{row} is projected, not written" for row in (right - left).elements()),
    ]


class Checker:
    """Judges one drill, as often as it is asked.

    Args:
        queues: bound to all that is published, and read by nobody else.
        business: a query for the message ids of which the writers' own tables have the row.
    """

    def __init__(
        self,
        history: History,
        database_url: str,
        broker_url: str,
        queues: Sequence[str],
        *,
        business: LiteralString | None = None,
        by_key: bool = True,
        holds: bool = True,
    ) -> None:
        self.deliveries: list[Delivered] = []  # all that was read from the queues until now
        self._history = history
        self._urls = database_url, broker_url
        self._queues = queues
        self._business = business
        self._rules = {"by_key": by_key, "holds": holds}

    async def ask(self, within: float = 60, *, at_rest: bool = False) -> Findings:
        """Return the findings once no row waits, or after `within` seconds, when rows that nobody moves count as lost.

        `at_rest`: read the queues only then. If a consumer is cancelled during deliveries of a quorum queue, RabbitMQ
        3.10 may swap neighbours, even ones that were confirmed one by one.
        """
        until = time.monotonic() + within
        while True:
            is_late = time.monotonic() > until
            if is_late or not at_rest or await is_settled(self._urls[0]):
                evidence = await self._look()
                evidence.patient = is_late
                if is_late or not evidence.waiting:
                    return judge(evidence)
            await asyncio.sleep(0.05)

    async def _look(self) -> Evidence:
        """Read the table first: a row that is marked sent by then is in a queue, because it was confirmed before."""
        database_url, broker_url = self._urls
        rows = await read_table(database_url)
        self.deliveries += await drain(broker_url, self._queues)
        business = None if self._business is None else await read_ids(database_url, self._business)
        return Evidence(self._history, rows, self.deliveries, business, **self._rules)


def _find(rule: Callable[[Evidence], Iterator[str]], evidence: Evidence) -> Finding:
    try:
        violations = list(rule(evidence))
    except NoDataError as missing:
        return Finding(Verdict.UNKNOWN, [str(missing)])
    if violations:
        return Finding(Verdict.INVALID, violations)
    if evidence.waiting:
        return Finding(Verdict.UNKNOWN, [f"{evidence.waiting} rows are still to be delivered"])
    return Finding(Verdict.VALID)
