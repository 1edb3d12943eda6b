"""Stages: how many rows a job does before it waits for what became of them, and when it goes no further."""

import re
from dataclasses import dataclass

from relay.errors import UsageError

SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *%")
MOST_STAGES = 20
MOST_ROWS = 100_000  # of a stage: what became of each is looked up until it is known
USUAL_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """How fast a job goes, and in which stages.

    Attributes:
        rate: rows a second at most; None: as fast as it can, or for a replay as live traffic allows.
        stages: the rows of each stage but the last, which has all the others; empty: one stage.
        stop_when_failing: the share of a stage's rows, 0.05 for 5 %, from which on the job pauses behind it.
    """

    rate: float | None = None
    stages: tuple[int, ...] = ()
    stop_when_failing: float | None = None

    def share_to_stop(self) -> float:
        """Return the share of failing rows at which the job pauses behind a stage."""
        return USUAL_SHARE if self.stop_when_failing is None else self.stop_when_failing

    def end_of(self, stage: int) -> int | None:
        """Return how many rows the job has done at the end of a stage, from 0; None: it is the last one."""
        return sum(self.stages[: stage + 1]) if stage < len(self.stages) else None

    def is_failing(self, failed: int, rows: int) -> bool:
        """Whether so many failed rows of a stage are too many."""
        return failed > 0 and failed >= self.share_to_stop() * rows


UNPACED = Pacing()


def parse_stages(text: str) -> tuple[int, ...]:
    """Return the stages that `1,10,100,all` names.

    Raises:
        UsageError: it does not end with `all`, or names a stage that cannot be.
    """
    *parts, last = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal()]
    if last != "all" or len(numbers) != len(parts) or not all(1 <= number <= MOST_ROWS for number in numbers):
        raise UsageError(f"--stages takes numbers from 1 to {MOST_ROWS:,} and then `all`: 1,10,100,all; not {text!r}")
    if len(numbers) > MOST_STAGES:
        raise UsageError(f"--stages takes at most {MOST_STAGES} numbers")
    return tuple(numbers)


def parse_share(text: str) -> float:
    """Return the share that `5%` names.

    Raises:
        UsageError: it is no percentage from 0 to 100.
    """
    found = SHARE.fullmatch(text.strip())
    if found is None or float(found[1]) > 100:
        raise UsageError(f"--stop-when-failing takes a percentage such as 5%; not {text!r}")
    return float(found[1]) / 100
