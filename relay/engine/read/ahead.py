"""When rows are read ahead of a backlog, and which.

A batch or a large transaction may leave a lane with hundreds of thousands of rows. Those that applications write after
it need not wait for all of them: they are read ahead, each behind the earlier rows of its key.

Nothing of this is saved, and no order rests on it: a row that is not read ahead comes in its turn.
"""

from collections import deque
from collections.abc import Collection, Mapping
from math import inf

AHEAD_INTERVAL = 0.1  # seconds between two reads ahead; each costs a statement
CROWD = 10  # times what a read ahead brings of a lane: more are a backlog, which no second of reading ahead clears
LOOK_BACK = 10.0  # seconds: a row that becomes visible later behind higher ids comes in its turn


class Ahead:
    """Above which id each lane that is behind is read ahead.

    That is the highest id which was given when the first backlog was found. Where many more rows come above it than a
    read brings, they are a backlog, too. Times are monotonic.

    Attributes:
        after: lane -> the id above which its rows are read ahead.
    """

    def __init__(self) -> None:
        self.after: Mapping[int, int] = {}
        self._at = 0.0  # the last read ahead, or the first read that found a backlog
        self._is_turn = False
        self._given: deque[tuple[float, int]] = deque([(-inf, 0)])  # (time, highest id that was given by then)

    def is_due(self, now: float) -> bool:
        """Whether to read ahead now. Between two such reads the backlog has one at least."""
        return bool(self.after) and self._is_turn and now >= self._at + AHEAD_INTERVAL

    def note_read(self, behind: Collection[int], position: int, now: float) -> None:
        """Note which lanes are behind after a read in order.

        Args:
            position: the highest id that was given when it was made.
        """
        if not self.after:
            self._at = now
        first = min(self.after.values(), default=position)
        self.after = {lane: self.after.get(lane, first) for lane in behind}
        self._is_turn = True

    def begin(self, now: float) -> None:
        """Note that it is read ahead now, or that there is no room to."""
        self._at, self._is_turn = now, False

    def move(self, crowded: Collection[int], position: int, now: float) -> None:
        """Move on after a read ahead.

        Args:
            crowded: lanes with a second backlog above `after`.
            position: as `note_read` takes it.
        """
        self._given.append((now, position))
        while len(self._given) > 1 and self._given[1][0] <= now - LOOK_BACK:
            self._given.popleft()
        oldest = self._given[0][1]
        self.after = {lane: position if lane in crowded else max(id_, oldest) for lane, id_ in self.after.items()}
