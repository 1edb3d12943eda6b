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
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Self

from relay.engine.session.segments import HIGHEST, Segment, Segments
from relay.engine.session.session import array_text

SLICE = 1 << 18  # ids that a read covers in a lane at most where each of its rows may have been sent already


NO_IDS = HIGHEST, 0


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
    """From where a session reads a lane; the default is the beginning of the log.

    Attributes:
        low: each row at or below it that `seen` could see has a receipt, or has moved out of the log.
        base: every row that `seen` could not see has an id above it.
    """

    low: int = 0
    seen: Snapshot = Snapshot(0, frozenset())
    base: int = 0


@dataclass(slots=True)
class LogLane:
    """How far a lane is read.

    Attributes:
        floor, seen: see above.
        base: every row that `seen` could not see has an id above it.
        low: the id above which the next read begins.
        near: where `low` was left by the last whole read. `low` goes back behind it when a transaction has ended that
            was first seen long ago. Reads then come in slices, in the order of ids, until they are at `near` again.
        checked_to: up to here an earlier session may have sent rows; None from there on.
        foreign_to: up to here transaction ids say nothing, as the tables were restored from another cluster.
        is_cut: whether the last read ended below the floor: `seen` does not tell that its rows were read. The next one
            leaves out those under way, and those that receipts name.
    """

    floor: int
    seen: Snapshot
    base: int
    low: int
    near: int
    checked_to: int | None = None
    foreign_to: int = 0
    is_cut: bool = False

    @classmethod
    def begin(cls, checkpoint: Checkpoint, receipts_to: int, foreign_to: int) -> Self:
        """Go on from a checkpoint; see `LogPositions.begin`."""
        low, seen, base = checkpoint
        return cls(
            low, seen, base, low=min(low, base), near=low, checked_to=max(low, receipts_to), foreign_to=foreign_to
        )

    @property
    def is_behind(self) -> bool:
        """Whether its next read may cover many rows that are sent; only one such lane is read at a time."""
        return self.checked_to is not None or self.near - self.low > SLICE

    @property
    def reach(self) -> int:
        """The highest id that the next read may bring."""
        if self.near - self.low > SLICE:
            return self.low + SLICE
        return HIGHEST if self.checked_to is None else self.floor + SLICE

    def go_back(self, to: int) -> None:
        """Begin the next read there: a transaction has ended that was first seen at that position."""
        self.low = min(self.low, max(self.base, to))

    def note(self, read_to: int, seen: Snapshot, *, low: int, base: int) -> None:
        """Note what a read has brought.

        Args:
            read_to: the id up to which it has brought all rows.
            seen: its snapshot.
            low, base: every row that `seen` could not see has an id above `base`. It also has one above `low`, unless
                its transaction was first seen long ago; when that ends, `go_back` follows.
        """
        if read_to < self.floor:
            self.low = max(self.low, min(read_to, low))
            self.is_cut = True
            return
        self.floor, self.seen = read_to, seen
        self.base = max(self.base, base, min(read_to, self.foreign_to))
        self.low = self.near = min(read_to, max(self.base, low))
        self.is_cut = False
        if self.checked_to is not None and read_to >= self.checked_to:
            self.checked_to = None


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The part of a read that is of the log.

    Attributes:
        lanes: where each of its lanes is.
        ends: for each of them, the highest id to read in both storages. A later row of a key must not come before an
            earlier one.
        segments: the tables to read.
    """

    lanes: Sequence[LogLane]
    ends: Sequence[int]
    segments: tuple[Segment, ...]

    @property
    def checked(self) -> tuple[int, int] | None:
        """The ids above floors between which to leave out the rows that receipts name; None without a check.

        At or below the floor of its lane, each row then looks for its receipt.
        """
        between = [
            (lane.floor, end) for lane, end in zip(self.lanes, self.ends, strict=True) if lane.checked_to is not None
        ]
        if between:
            return min(floor for floor, _ in between), max(end for _, end in between)
        return NO_IDS if any(lane.is_cut for lane in self.lanes) else None


class LogPositions:
    """The positions of the lanes whose first read has been prepared by `begin`."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._lanes: dict[int, LogLane] = {}

    def unknown(self, lanes: Iterable[int]) -> list[int]:
        """Return the lanes that need a checkpoint before they can be read."""
        return [lane for lane in lanes if lane not in self._lanes]

    def begin(self, checkpoints: Mapping[int, Checkpoint], receipts_to: int, foreign_to: int) -> None:
        """Read lanes from their checkpoints.

        Args:
            receipts_to: no receipt of an earlier session names an id above it.
            foreign_to: up to this id the transaction ids of rows are another cluster's, if a lane has no checkpoint.
        """
        for lane, checkpoint in checkpoints.items():
            is_first = checkpoint == Checkpoint()
            self._lanes[lane] = LogLane.begin(checkpoint, receipts_to, foreign_to if is_first else 0)

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
        return lane in self._lanes

    def is_behind(self, lane: int) -> bool:
        """Whether only one such lane may be read at a time."""
        return lane in self._lanes and self._lanes[lane].is_behind

    def plan(self, lanes: Iterable[int]) -> LogPlan | None:
        """Return what to read of the log for these lanes; None without a lane."""
        states = [self._lanes[lane] for lane in lanes]
        if not states:
            return None
        ends: list[int] = []
        segments: set[Segment] = set()
        for lane in states:
            last = min(lane.reach, lane.floor + 1)
            of_lane = self._segments.between(lane.low + 1, last)
            segments.update(of_lane)
            ends.append(min(lane.reach, of_lane[-1].past - 1))
        return LogPlan(states, ends, tuple(sorted(segments, key=attrgetter("first"))))

    def read_to(self, lanes: Iterable[int]) -> dict[int, Checkpoint]:
        """Return how far these lanes are read: rows under way are not behind it."""
        states = {lane: self._lanes[lane] for lane in lanes if lane in self._lanes}
        return {lane: Checkpoint(state.floor, state.seen, state.base) for lane, state in states.items()}

    def checkpoint(self, lane: int, lowest: int | None) -> Checkpoint | None:
        """Return the checkpoint of a lane whose lowest row under way is `lowest`.

        None if the lane was never read, or not yet as far as transaction ids say nothing.
        """
        state = self._lanes.get(lane)
        if state is None or state.floor < state.foreign_to:
            return None
        return Checkpoint(state.floor if lowest is None else min(state.floor, lowest - 1), state.seen, state.base)
