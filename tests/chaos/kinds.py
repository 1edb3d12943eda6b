"""The kinds of faults, and a planned fault of one kind."""

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
        at: seconds from the start; later if the previous fault of its track still lasts.
        relay: the relay that it hits; empty for all.
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
        act: causes the fault, waits as long as planned, and heals it.
        reach: ALL if a relay that it hits may be unready meanwhile.
        forgets: lanes may go to a relay that does not know what was in flight.
        seconds: how long it lasts, at least and at most.
    """

    name: str
    act: Callable[[Fleet, Planned], Awaitable[None]]
    reach: Reach
    forgets: bool
    seconds: tuple[float, float] = (0.0, 0.0)
