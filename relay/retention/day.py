"""A day that is older than is kept: how far its drop has come, and what becomes of it."""

from dataclasses import dataclass, replace
from datetime import date, datetime
from enum import StrEnum

from relay.retention.kind import Kind

MARK = "outbox retention drops this day"  # a comment on its table


class Stage(StrEnum):
    """How far an earlier round came with a day."""

    ATTACHED = "attached"
    DETACHING = "detaching"  # left pending: new queries do not see it, older ones may
    DETACHED = "detached"  # a table of its own


class Fate(StrEnum):
    """What becomes of a day that is older than what is kept."""

    OLD = "old"  # nothing is in the way
    POSTPONED = "postponed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OldDay:
    """A partition whose rows are all older than what is kept."""

    kind: Kind
    table: str
    first: datetime
    next: datetime  # exclusive
    stage: Stage
    is_marked: bool
    bytes: int  # with indexes and what is stored out of line
    rows: int | None = None  # None: not counted
    fate: Fate = Fate.OLD
    reason: str = ""  # why it is postponed

    @property
    def day(self) -> date:
        return self.first.date()

    def postponed(self, reason: str) -> "OldDay":
        return replace(self, fate=Fate.POSTPONED, reason=reason)
