"""How far each lane of the log is read: decisions only, no statement and no waiting.

A row of the log stays where it is when it is sent, so its state does not tell what was read. A lane remembers how far
it was read (`floor`) and with which snapshot (`seen`):

    Each row at or below the floor that the snapshot could see was read. It is in the window, a receipt names it, or it
    has moved out of the log.

Any other row is above the floor, or its transaction was running then or came later. There is no third kind of row, in
whatever order transactions took their ids. What goes by the order of ids is only where a read begins (`low`). The sweep
finds the rows whose id was taken long before.

A checkpoint keeps the floor behind the rows that are under way, with the same snapshot. A session begins there. The
session before it may have gone on after the checkpoint, so the first reads leave out what receipts name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Self

from relay.engine.row import Row
from relay.engine.session.segments import HIGHEST, Segment, Segments
from relay.engine.session.session import array_text

CHECKED_IDS = 1 << 18  # above the floors, which a read compares with receipts: their ids are in memory at once


class Snapshot(NamedTuple):
    """What a statement can see: the transactions below `seen_to`, but not the `unseen`."""

    seen_to: int
    unseen: frozenset[int]

    @property
    def text(self) -> str:
        """The unseen ones as an array of PostgreSQL."""
        return array_text(self.unseen)

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read a pg_snapshot. It names no running transaction above the last one that has ended."""
        _, seen_to, running = text.split(b":")
        return cls(int(seen_to), frozenset(int(xid) for xid in running.split(b",") if xid))


class Checkpoint(NamedTuple):
    """From where a session reads a lane.

    Attributes:
        low: each row at or below it that `seen` could see has a receipt, or has moved out of the log.
        base: every row that `seen` could not see has an id above it.
    """

    low: int
    seen: Snapshot
    base: int


@dataclass(slots=True)
class LogLane:
    """How far a lane is read.

    Attributes:
        floor, seen: see above.
        base: every row that `seen` could not see has an id above it.
        low: the id above which the next read begins. Transactions that were seen long ago and still run may have rows
            between `base` and `low`; when one has ended, `low` goes back.
        taken: rows that reads have brought which ended below the floor: `seen` does not tell that they were read.
        checked_to: up to here an earlier session may have sent rows; None from there on.
    """

    floor: int
    seen: Snapshot
    base: int
    low: int
    checked_to: int | None
    taken: set[int] = field(default_factory=set)

    def go_back(self, to: int) -> None:
        """Begin the next read there: a transaction has ended that was first seen at that position."""
        self.low = min(self.low, max(self.base, to))

    def note(self, rows: Sequence[Row], cut: int | None, end: int, seen: Snapshot, *, low: int, base: int) -> None:
        """Note what a read has brought.

        Args:
            cut: the id up to which it has brought all rows, when there was no room for more.
            end: how far it has come otherwise.
            seen: its snapshot.
            low, base: what follows from the transactions that ran then; see the attributes.
        """
        floor = max(end, self.floor, rows[-1].id if rows else end) if cut is None else cut  # a writer may name any id
        if floor < self.floor:
            self.taken.update(row.id for row in rows)
            return
        self.floor, self.seen, self.base = floor, seen, max(self.base, base)
        self.low = min(floor, max(self.base, low))
        self.taken.clear()
        if self.checked_to is not None and floor >= self.checked_to:
            self.checked_to = None


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The part of a read that is of the log.

    Attributes:
        lanes: where each of its lanes is.
        segments: the tables to read.
        end: the highest id to read, in both storages: a later row of a key must not come before an earlier one.
        is_checked: whether to leave out the rows that receipts name.
    """

    lanes: list[LogLane]
    segments: tuple[Segment, ...]
    end: int
    is_checked: bool

    @property
    def lowest_floor(self) -> int:
        return min(lane.floor for lane in self.lanes)

    def taken(self) -> Iterable[int]:
        """Return the ids that it must leave out."""
        return chain.from_iterable(lane.taken for lane in self.lanes)


class LogPositions:
    """The positions of the lanes whose first read has been prepared by `begin`."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._lanes: dict[int, LogLane] = {}

    def unknown(self, lanes: Iterable[int]) -> list[int]:
        """Return the lanes that need a checkpoint before they can be read."""
        return [lane for lane in lanes if lane not in self._lanes]

    def begin(self, checkpoints: Mapping[int, Checkpoint], receipts_to: int) -> None:
        """Read lanes from their checkpoints; above the id `receipts_to` no receipt of an earlier session is."""
        for lane, (low, seen, base) in checkpoints.items():
            self._lanes[lane] = LogLane(low, seen, base, low=min(low, base), checked_to=receipts_to)

    def forget(self, lanes: Iterable[int]) -> None:
        """Forget where these lanes are: other sessions may have read them since."""
        for lane in lanes:
            self._lanes.pop(lane, None)

    def go_back(self, lanes: Iterable[int], to: int) -> None:
        """Begin the next read of the lanes at a position, as a transaction that was first seen there has ended."""
        for lane in lanes:
            if lane in self._lanes:
                self._lanes[lane].go_back(to)

    def may_read(self, lane: int) -> bool:
        """Whether it is known from where to read a lane."""
        return lane in self._lanes or not self._segments

    def plan(self, lanes: Iterable[int]) -> LogPlan | None:
        """Return what to read of the log for these lanes; None while it is not used."""
        if not self._segments:
            return None
        states = [self._lanes[lane] for lane in lanes]
        if not states:
            return None
        highest = max(lane.floor for lane in states)
        segments = self._segments.between(min(lane.low for lane in states) + 1, min(highest + 1, HIGHEST))
        is_checked = any(lane.checked_to is not None for lane in states)
        end = segments[-1].past - 1
        return LogPlan(states, segments, min(end, highest + CHECKED_IDS) if is_checked else end, is_checked)

    def checkpoint(self, lane: int, lowest: int | None) -> Checkpoint | None:
        """Return the checkpoint of a lane whose lowest row under way is `lowest`; None if it was never read."""
        if (state := self._lanes.get(lane)) is None:
            return None
        return Checkpoint(state.floor if lowest is None else min(state.floor, lowest - 1), state.seen, state.base)
