"""What can be done to a run, and to whom."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from tests.chaos.fleet import Fleet
from tests.faults.history import Reach


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of a plan.

    Attributes:
        number: its place in the plan.
        at: seconds from the start, or as soon as what comes before it on the same track is over.
        relay: whom it hits; empty: everyone.
        seconds: how long it lasts.
        seed: decides the rest.
    """

    number: int
    at: float
    kind: "FaultKind"
    relay: str
    seconds: float
    seed: int

    @property
    def what(self) -> str:
        return f"{self.number} {self.kind.name} {self.relay}".rstrip()

    def chance(self) -> Random:
        return Random(self.seed)


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        act: breaks it, lasts as long as planned, and mends it.
        reach: whether a relay that it hits may be unready meanwhile (ALL).
        forgets: lanes may go to a relay that does not know what was under way.
        seconds: how long it lasts, at least and at most.
    """

    name: str
    act: Callable[[Fleet, Planned], Awaitable[None]]
    reach: Reach
    forgets: bool
    seconds: tuple[float, float] = (0.0, 0.0)
