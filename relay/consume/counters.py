"""What a consumer has done, and what it has in flight."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, Self

from relay.observe.histogram import Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
OF_THE_MOMENT = {"in_flight", "last_age", "times"}  # these are left out of a log line


@dataclass(slots=True)
class Counters:
    """Counts since the consumer was made; `unacknowledged`, `in_flight`, `held` and `last_age` are current values."""

    deliveries: int = 0
    redeliveries: int = 0  # deliveries that had been delivered before, maybe to another consumer
    acknowledged: int = 0
    unacknowledged: int = 0
    given_back: int = 0  # unacknowledged when their channel ended: they come again
    applied: int = 0  # committed for the first time
    duplicates: int = 0  # applied before; acknowledged without effect
    failed: int = 0  # attempts in which a handler failed
    retried: Counter[float] = field(default_factory=Counter)  # put off until their next try, by step (seconds)
    dead_letters: Counter[str] = field(default_factory=Counter)  # by reason
    held: int = 0  # messages of this consumer in the table, whichever process put them there
    repeated: int = 0  # tries that ended by a stale session or another transaction
    overloads: int = 0  # tries that ended by an overload
    paused_seconds: float = 0.0  # for overloads; updated at each probe, and when it is read
    in_flight: int = 0  # running transactions
    last_age: float | None = None  # seconds from the writing of the last applied message until it was applied
    broker_losses: Counter[str] = field(default_factory=Counter)  # lost connections, by reason
    database_losses: Counter[str] = field(default_factory=Counter)
    times: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # seconds of each transaction

    def copy(self) -> Self:
        """Return a copy, which stays as it is while these counters go on."""
        return deepcopy(self)

    def add(self, other: "Counters") -> None:
        """Add the counts of another part of the same consumer."""
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(ours, Histogram):
                ours.add(theirs)
            elif each.name == "last_age":
                self.last_age = theirs if ours is None else ours
            else:
                setattr(self, each.name, ours + theirs)

    def ended(self) -> Self:
        """Return the counts that stay when a part of a consumer has ended: it has nothing in flight now."""
        left = self.copy()
        left.held = left.unacknowledged = left.in_flight = 0
        left.last_age = None
        return left

    def told(self) -> dict[str, Any]:
        """Return the counts for a log line."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OF_THE_MOMENT}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class ConsumerSnapshot:
    """A consumer at one moment."""

    consumer: str  # the name of its inbox
    queue: str
    ready: bool
    stalled: bool
    paused: bool
    counters: Counters  # a copy
    steps: Sequence[float]  # of its retries, in seconds
    refused_seconds: Mapping[str, float]  # by end; 0 while it does not refuse us
