"""The faults of a drill, from injection to heal."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from tests.faults.history import Healed, History, Injected, Reach


@dataclass(frozen=True, slots=True)
class Fault:
    """From an injection to its heal, which may not have come."""

    what: str
    begun: float
    healed: float
    reach: Reach
    forgets: bool
    relay: str

    @property
    def is_healed(self) -> bool:
        return self.healed < inf

    @property
    def ended(self) -> float:
        """The moment of the heal. A fault without one was over at once."""
        return self.healed if self.is_healed else self.begun

    def hits(self, relay: str) -> bool:
        return self.relay in ("", relay)


def faults(history: History) -> list[Fault]:
    """Return the faults in the order in which they began."""
    found: list[Fault] = []
    for place, record in enumerate(history):
        if isinstance(record, Injected):
            healed = (later.at for later in history[place:] if isinstance(later, Healed) and later.what == record.what)
            end = next(healed, inf)
            found.append(Fault(record.what, record.at, end, record.reach, record.forgets, record.relay))
    return found


def storms(given: Iterable[Fault], calm: float) -> list[Fault]:
    """Return the faults, joined where fewer than `calm` seconds lie between them."""
    joined: list[Fault] = []
    for fault in sorted(given, key=lambda fault: fault.begun):
        if joined and fault.begun < joined[-1].healed + calm:
            healed = max(joined[-1].healed, fault.healed)
            joined[-1] = replace(joined[-1], what=f"{joined[-1].what}, {fault.what}", healed=healed)
        else:
            joined.append(fault)
    return joined
