"""What a drill broke, and when it was whole again."""

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
        """What is never healed was over as soon as it had happened."""
        return self.healed if self.is_healed else self.begun

    def hits(self, relay: str) -> bool:
        return self.relay in ("", relay)


def faults(history: History) -> list[Fault]:
    """Give them in the order of their beginning."""
    found: list[Fault] = []
    for place, record in enumerate(history):
        if isinstance(record, Injected):
            healed = (later.at for later in history[place:] if isinstance(later, Healed) and later.what == record.what)
            end = next(healed, inf)
            found.append(Fault(record.what, record.at, end, record.reach, record.forgets, record.relay))
    return found


def storms(given: Iterable[Fault], calm: float) -> list[Fault]:
    """Join those between which there were fewer than `calm` seconds."""
    joined: list[Fault] = []
    for fault in sorted(given, key=lambda fault: fault.begun):
        if joined and fault.begun < joined[-1].healed + calm:
            healed = max(joined[-1].healed, fault.healed)
            joined[-1] = replace(joined[-1], what=f"{joined[-1].what}, {fault.what}", healed=healed)
        else:
            joined.append(fault)
    return joined
