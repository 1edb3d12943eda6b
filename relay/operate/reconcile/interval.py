"""Of which time rows and messages are compared."""

from dataclasses import dataclass
from datetime import datetime, timedelta

# A message may be applied long before its row is marked, and long after. What lies this near is read in the same pass.
# What lies farther off is looked up, so the figure decides about the cost and never about the result.
BORDER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Interval:
    """A time range by the clock of the outbox's database, and how late a message may be applied in it."""

    since: datetime
    until: datetime  # exclusive, never in the future
    now: datetime
    grace: timedelta

    @property
    def expected_until(self) -> datetime:
        """What was sent from then on need not have been applied yet."""
        return max(self.since, min(self.until, self.now - self.grace))

    @property
    def first_read(self) -> datetime:
        return self.since - BORDER

    @property
    def end_read(self) -> datetime:
        return self.until + BORDER + self.grace
