"""Compare what writers committed with what was delivered, knowing nothing of relay and consumer.

The writers tell their own history; the deliveries are read from a queue that nobody else reads. Numbers count the
committed messages of a key from 1, under a lock that the writer holds until its transaction ends.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID


class Fault(StrEnum):
    """What must never be."""

    LOST = "lost"  # committed, never delivered
    INVENTED = "invented"  # delivered, but rolled back or never written
    REORDERED = "reordered"  # first delivered after a later one of its key
    CHANGED = "changed"  # delivered with another key or number than was written
    UNEQUAL = "unequal"  # a row at one end that is not at the other, or differs


@dataclass(frozen=True, slots=True)
class Written:
    """A message that a writer inserted, and how its transaction ended."""

    message_id: UUID
    key: str
    number: int
    committed: bool


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message as it was read from a queue."""

    message_id: UUID
    key: str
    number: int


@dataclass(frozen=True, slots=True)
class Violation:
    fault: Fault
    what: str

    def __str__(self) -> str:
        return f"{self.fault}: {self.what}"


def check_deliveries(history: Sequence[Written], deliveries: Sequence[Delivered]) -> list[Violation]:
    """Tell each violation of: every committed message, none that was rolled back, first deliveries in order per key."""
    committed = {written.message_id: written for written in history if written.committed}
    firsts = list(_firsts(deliveries))
    return [
        *_lost(committed, firsts),
        *_invented(committed, history, firsts),
        *_changed(committed, deliveries),
        *_reordered([first for first in firsts if first.message_id in committed]),
    ]


def check_rows(written: Iterable[tuple[object, ...]], projected: Iterable[tuple[object, ...]]) -> list[Violation]:
    """Tell each row of one end that the other has not, or not as often."""
    left, right = Counter(written), Counter(projected)
    return [
        *(Violation(Fault.UNEQUAL, f"{row} is written, not projected") for row in (left - right).elements()),
        *(Violation(Fault.UNEQUAL, f"{row} is projected, not written") for row in (right - left).elements()),
    ]


def report(violations: Sequence[Violation], at_most: int = 20) -> str:
    """Give the violations as lines, the first of them in full, all of them counted."""
    counts = Counter(violation.fault for violation in violations)
    head = ", ".join(f"{fault} {count}" for fault, count in sorted(counts.items())) or "no violation"
    return "\n".join([head, *map(str, violations[:at_most])])


def _firsts(deliveries: Sequence[Delivered]) -> Iterator[Delivered]:
    seen: set[UUID] = set()
    for delivered in deliveries:
        if delivered.message_id not in seen:
            seen.add(delivered.message_id)
            yield delivered


def _lost(committed: dict[UUID, Written], firsts: Sequence[Delivered]) -> Iterator[Violation]:
    arrived = {first.message_id for first in firsts}
    for message_id, written in committed.items():
        if message_id not in arrived:
            yield Violation(Fault.LOST, f"{message_id}, number {written.number} of {written.key}")


def _invented(
    committed: dict[UUID, Written], history: Sequence[Written], firsts: Sequence[Delivered]
) -> Iterator[Violation]:
    rolled_back = {written.message_id for written in history if not written.committed}
    for first in firsts:
        if first.message_id not in committed:
            why = "was rolled back" if first.message_id in rolled_back else "was never written"
            yield Violation(Fault.INVENTED, f"{first.message_id}, number {first.number} of {first.key}, {why}")


def _changed(committed: dict[UUID, Written], deliveries: Sequence[Delivered]) -> Iterator[Violation]:
    for place, delivered in enumerate(deliveries):
        written = committed.get(delivered.message_id)
        if written is not None and (written.key, written.number) != (delivered.key, delivered.number):
            now, then = f"number {delivered.number} of {delivered.key}", f"number {written.number} of {written.key}"
            yield Violation(Fault.CHANGED, f"{delivered.message_id} at place {place} is {now}, was {then}")


def _reordered(firsts: Sequence[Delivered]) -> Iterator[Violation]:
    highest: defaultdict[str, int] = defaultdict(int)
    for first in firsts:
        if first.number < highest[first.key]:
            what = f"number {first.number} of {first.key} came after number {highest[first.key]}"
            yield Violation(Fault.REORDERED, what)
        highest[first.key] = max(highest[first.key], first.number)
