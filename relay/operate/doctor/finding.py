"""One line of the checklist."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"  # it works, and will cost something some day
    FAILED = "failed"  # the relay cannot work, or messages would not get where they belong
    SKIPPED = "skipped"  # not looked at; the words say why


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw; a check may have several, one a host or a route."""

    check: str  # part and name: `database.tables`; stable, for who reads the JSON
    verdict: Verdict
    words: str  # what was seen, with its figures
    remedy: str = ""  # what to do about a warning or a failure

    @property
    def part(self) -> str:
        return self.check.partition(".")[0]

    @property
    def name(self) -> str:
        return self.check.partition(".")[2]


def worst(findings: list[Finding]) -> Verdict:
    """Return what the findings come to as a whole."""
    seen = {finding.verdict for finding in findings}
    return next((verdict for verdict in (Verdict.FAILED, Verdict.WARNING) if verdict in seen), Verdict.OK)


def summary(findings: list[Finding]) -> str:
    """Return how many findings have each verdict: "1 failed, 0 warning, 31 ok, 2 skipped"."""
    counts = Counter(finding.verdict for finding in findings)
    order = (Verdict.FAILED, Verdict.WARNING, Verdict.OK, Verdict.SKIPPED)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in order)
