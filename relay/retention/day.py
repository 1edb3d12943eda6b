"""A day that is older than is kept, and what becomes of it."""

from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum

from relay.retention.kind import DatedTable


class Fate(StrEnum):
    """What becomes of a day that is older than what is kept."""

    OLD = "old"  # nothing is in the way
    POSTPONED = "postponed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OldDay:
    """A partition whose rows are all older than what is kept."""

    kind: DatedTable
    table: str
    day: date
    bytes: int  # with indexes and what is stored out of line
    rows: int | None = None  # None: not counted
    fate: Fate = Fate.OLD
    reason: str = ""  # why it is postponed

    def postponed(self, reason: str) -> "OldDay":
        return replace(self, fate=Fate.POSTPONED, reason=reason)
