"""Transactions that run while the table is read: their rows will become visible behind rows that were read."""

from collections import deque

GAP = 0.05  # seconds between taking an id and taking a transaction id, at most (the sweep catches the rest)
NEAR = 5_000  # ids: running transactions that started within them are awaited by reading from there each time


class OpenTransactions:
    """How far back the next read has to begin; times are monotonic, positions are ids."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}  # transaction id -> the position at which it was first seen
        self._positions: deque[tuple[float, int]] = deque([(0.0, 0)])  # (after a read, highest id given by then)

    def horizon(self, known_until: float) -> int:
        """Return the highest position up to which each id belongs to a transaction that had its own id by then."""
        while len(self._positions) > 1 and self._positions[1][0] <= known_until - GAP:
            self._positions.popleft()
        return self._positions[0][1]

    def floor(self, horizon: int) -> int:
        """Return the position from which to read the rows of transactions that run now, or have just begun."""
        position = self._positions[-1][1]
        return min([horizon, *(since for since in self._since.values() if position - since <= NEAR)])

    def note(self, snapshot: bytes, horizon: int) -> int | None:
        """Learn from a snapshot what runs; return the lowest position at which an ended one was first seen, if any."""
        running = {int(xid) for xid in snapshot.split(b":")[2].split(b",") if xid}
        ended = [self._since.pop(xid) for xid in self._since.keys() - running]
        for xid in running - self._since.keys():
            self._since[xid] = horizon
        return min(ended, default=None)

    def note_read(self, at: float, position: int) -> None:
        """Note that a read has ended at that time; `position` was the highest id given when it was made."""
        self._positions.append((at, position))
