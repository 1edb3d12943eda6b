"""The summary of a run: counts, the verdict on each invariant, and the violations."""

from collections import Counter
from collections.abc import Iterator

from tests.chaos.run import Outcome
from tests.faults.checker import Invariant, Verdict, report
from tests.faults.history import Written

# What may stay unknown: a fault that hits some keys must fleet alone, or the keys that it spares are not innocent.
MAY_BE_UNKNOWN = {Invariant.INNOCENT_KEYS}


def failures(outcome: Outcome) -> list[Invariant]:
    """Return the invariants that are invalid, or unknown although the run must judge them."""
    return [
        invariant
        for invariant, finding in outcome.findings.items()
        if finding.verdict is Verdict.INVALID
        or (finding.verdict is Verdict.UNKNOWN and invariant not in MAY_BE_UNKNOWN)
    ]


def is_passed(outcome: Outcome) -> bool:
    return not failures(outcome) and not outcome.complaints


def lines(outcome: Outcome) -> Iterator[str]:
    """Return the lines of the summary, with the violations last."""
    endings = Counter(record.ending for record in outcome.history if isinstance(record, Written))
    delivered = {one.message_id for one in outcome.deliveries}
    yield f"messages  {', '.join(f'{ending} {number:,}' for ending, number in sorted(endings.items()))}"
    yield f"delivered {len(delivered):,}, sent again {len(outcome.deliveries) - len(delivered):,}"
    yield f"parked    {outcome.parked:,}, lost {len(outcome.findings[Invariant.NOTHING_LOST].words):,}"
    yield f"faults    {outcome.injected.total()}"
    yield from (f"{number:9} {name}" for name, number in sorted(outcome.injected.items()))
    for invariant, finding in outcome.findings.items():
        why = f" ({finding.words[0]})" if finding.verdict is Verdict.UNKNOWN and finding.words else ""
        yield f"{finding.verdict:8} {invariant}{why}"
    if bad := failures(outcome):
        yield report(outcome.findings, bad)
    yield from outcome.complaints
