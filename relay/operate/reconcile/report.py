"""What a reconciliation found; the field names are the keys of its JSON."""

from dataclasses import dataclass, field
from datetime import date, datetime
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Count:
    """Rows of one state and one day (UTC): that of sending, for rows that were not sent that of writing."""

    day: date
    state: str  # sent, pending, quarantined, parked, held (parked behind another row), discarded
    rows: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A message that was sent and that the consumer has not applied."""

    message_id: UUID
    id: int
    sent_at: datetime


@dataclass(frozen=True, slots=True)
class Lost:
    """A message that the consumer has applied and of which the table has no row in any state."""

    message_id: UUID
    processed_at: datetime


@dataclass(slots=True)
class ConsumerReport:
    """What one consumer has applied of what was sent; of `missing_first` and `lost_first` no more than asked for."""

    consumer: str
    expected: int = 0
    applied: int = 0
    missing: int = 0
    dead: int = 0  # not applied, and in its queue of dead letters
    lost: int = 0
    lost_from: datetime | None = None  # when the first and the last of them were applied
    lost_until: datetime | None = None
    missing_first: list[Missing] = field(default_factory=list)
    lost_first: list[Lost] = field(default_factory=list)
    event_types: list[str] | None = None  # that it handles; None: every type is expected
    queues: list[str] = field(default_factory=list)  # that it has noted


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A message id that several rows have: an inbox lets only one of them through."""

    message_id: UUID
    rows: int


@dataclass(frozen=True, slots=True)
class RepeatedKey:
    """A business key of which a consumer has applied several messages."""

    consumer: str
    business_key: str
    messages: int


@dataclass(frozen=True, slots=True)
class Mend:
    """The command that sends again what is missing."""

    command: str
    is_exact: bool  # else it also sends what was applied, which the inboxes absorb


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """All that was found; `differences` has a line for each kind that is not as it should be."""

    since: datetime
    until: datetime
    expected_until: datetime  # what was sent later is within the grace period
    kept_from: datetime | None  # rows that were sent before are no longer kept
    rows: list[Count]
    consumers: list[ConsumerReport]
    duplicates: int
    duplicates_first: list[Duplicate]
    repeated_keys: int | None  # None: not asked for
    repeated_keys_first: list[RepeatedKey]
    differences: list[str]
    mend: Mend | None

    def rows_of(self, state: str) -> int:
        """Count the rows of a state over all days."""
        return sum(count.rows for count in self.rows if count.state == state)
