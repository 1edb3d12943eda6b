"""What every command that changes rows or letters keeps in the audit, and the consent that one that destroys needs.

A command that destroys shows what would go, asks, and keeps who did it, when and why.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from cyclopts import Parameter

from relay.cli.options import By
from relay.cli.printing import Row, aside, say
from relay.errors import UsageError
from relay.jobs.job import operator
from relay.observe.printable import utc

EXCERPT = 5  # rows


@dataclass(frozen=True, slots=True)
class Loss:
    """What a command would destroy."""

    what: str  # a verb and the counts: "discard 3 rows"
    oldest: datetime | None = None
    excerpt: Sequence[Row] = ()

    @property
    def lines(self) -> list[str]:
        """The excerpt and the oldest, below the counts."""
        lines = ["  ".join(str(value) for value in row) for row in self.excerpt[:EXCERPT]]
        if self.oldest is not None:
            lines.append(f"the oldest is of {utc(self.oldest)}")
        return lines


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who changes something, and why."""

    why: Annotated[str, Parameter(help="Kept in the audit.")] = ""
    by: By = None

    @property
    def operator(self) -> str:
        """Who does it."""
        return operator(self.by)

    @property
    def reason(self) -> str:
        """Why it is done; empty if nobody said."""
        return self.why.strip()

    def check_reason(self) -> None:
        """Refuse to go on without a reason.

        Raises:
            UsageError: there is no reason.
        """
        if not self.reason:
            raise UsageError("--why is needed: it is kept with who did it and when")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(Audit):
    """What an operator says to a command that destroys."""

    why: Annotated[str, Parameter(help="Kept in the audit; needed unless it is a dry run.")] = ""
    yes: Annotated[bool, Parameter(help="Do not ask; needed where nobody can be asked.")] = False
    dry_run: Annotated[bool, Parameter(help="Change nothing; show what would go.")] = False

    def check(self) -> None:
        """Refuse what lacks a reason or an answer; call it before anything is read.

        Raises:
            UsageError: there is no reason, or nobody can be asked.
        """
        if self.dry_run:
            return
        self.check_reason()
        if not self.yes and not sys.stdin.isatty():
            raise UsageError("nobody can be asked here: --dry-run shows what would go, and --yes does it unasked")

    def is_given(self, look: Callable[[], Loss]) -> bool:
        """Whether to go on: at once with `--yes`, else as the operator answers to what `look` has found."""
        if self.yes:
            return True
        loss = look()
        show_excerpt(loss)
        aside(f"{loss.what}? [y/N]")
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def show_loss(loss: Loss) -> None:
    """Print what a dry run has found."""
    say(f"would {loss.what}")
    show_excerpt(loss)


def show_excerpt(loss: Loss) -> None:
    """Print the excerpt and the oldest on stderr, out of the way of a pipe."""
    for line in loss.lines:
        aside(line)
