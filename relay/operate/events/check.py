"""Compare declared events with an earlier export: whether old and new writers and readers fit, by event."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from relay.operate.events.contract import Contract
from relay.operate.events.fits import misfits
from relay.operate.events.shape import Schema


class Require(StrEnum):
    """What a change must keep."""

    BACKWARD = "backward"  # new readers take old messages
    FORWARD = "forward"  # old readers take new messages
    FULL = "full"  # both


class Compatibility(StrEnum):
    """What a change keeps."""

    FULL = "FULL"
    BACKWARD = "BACKWARD"
    FORWARD = "FORWARD"
    NONE = "NONE"
    NEW = "NEW"  # the export does not have this event, or this version of it
    REMOVED = "REMOVED"  # only the export has it


ALWAYS = frozenset((Compatibility.FULL, Compatibility.NEW))
KEEPING = {
    Require.BACKWARD: ALWAYS | {Compatibility.BACKWARD},
    Require.FORWARD: ALWAYS | {Compatibility.FORWARD, Compatibility.REMOVED},
    Require.FULL: ALWAYS,
}


@dataclass(frozen=True, slots=True)
class EventVerdict:
    """The verdict on one version of an event.

    Attributes:
        backward: why a new reader does not take all old messages.
        forward: why an old reader does not take all new messages.
    """

    event_type: str
    version: str | None
    verdict: Compatibility
    backward: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()

    def keeps(self, required: Require) -> bool:
        """Whether the change keeps what is required. A removed event has no new reader, and no new messages."""
        return self.verdict in KEEPING[required]

    @property
    def reasons(self) -> tuple[str, ...]:
        backward = (f"a new reader, an old message: {each}" for each in self.backward)
        forward = (f"an old reader, a new message: {each}" for each in self.forward)
        return (*backward, *forward)


def compare_all(old: Iterable[Contract], new: Iterable[Contract]) -> list[EventVerdict]:
    """Return the comparison of each version of each event, sorted by event and version."""
    before, now = ({each.name: each for each in contracts} for contracts in (old, new))
    names = sorted(before.keys() | now.keys(), key=lambda name: (name[0], name[1] or ""))
    return [_of_one(*name, before.get(name), now.get(name)) for name in names]


def compare(old: Contract, new: Contract) -> EventVerdict:
    """Return the comparison of two contracts of one version of an event."""
    backward = _reasons(old.written, new.read)
    forward = (*_of_key(old, new), *_reasons(new.written, old.read))
    verdict = {
        (True, True): Compatibility.FULL,
        (True, False): Compatibility.BACKWARD,
        (False, True): Compatibility.FORWARD,
        (False, False): Compatibility.NONE,
    }[not backward, not forward]
    return EventVerdict(new.event_type, new.version, verdict, backward, forward)


def _of_one(event_type: str, version: str | None, old: Contract | None, new: Contract | None) -> EventVerdict:
    if old is not None and new is not None:
        return compare(old, new)
    if old is None:
        return EventVerdict(event_type, version, Compatibility.NEW)
    return EventVerdict(event_type, version, Compatibility.REMOVED, ("no class of these modules reads it",))


def _of_key(old: Contract, new: Contract) -> Iterator[str]:
    if old.aggregate_type != new.aggregate_type:
        yield f"the aggregate type is {new.aggregate_type!r}, not {old.aggregate_type!r}: it may take another route"
    if old.aggregate_id != new.aggregate_id:
        yield f"the aggregate id is {new.aggregate_id}, not {old.aggregate_id}: other messages come in order"


def _reasons(written: Schema, read: Schema) -> tuple[str, ...]:
    return tuple(f"payload{place} {words}" for place, words in misfits(written, read))
