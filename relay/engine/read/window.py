"""What was read and is not yet settled, bounded in rows and bytes, and fair to every lane.

The bound in bytes starts low and grows with what is settled. A relay that was killed for its memory thus makes progress
after each start, and sends only a few rows again.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from relay.config.settings import RelaySettings
from relay.engine.row import Row
from relay.memory import beside

LANE_SHARE = 4  # a lane may hold this part of the window: one whose key is stuck must not fill all of it
READ_SHARE = 4  # a read brings this part of the window at most: its rows are in libpq's memory at the same time
START_BYTES = 8 * 1024 * 1024


class Window:
    """The rows under way, by lane.

    Attributes:
        lane_quota: rows that one lane may hold.
        settled: bytes that have left it.
    """

    def __init__(self, settings: RelaySettings) -> None:
        self._max_rows, self._most_bytes = settings.max_window_rows, settings.max_window_bytes
        self._largest = settings.max_message_bytes
        self._max_bytes = min(START_BYTES, self._most_bytes)  # grows
        self._sizes = defaultdict[int, dict[int, int]](dict)  # lane -> id -> bytes
        self._rows = self._bytes = self.settled = 0
        self.lane_quota = max(1, settings.max_window_rows // LANE_SHARE)

    @property
    def room(self) -> tuple[int, int]:
        """Rows and bytes that a read may bring."""
        return self._max_rows - self._rows, min(self._max_bytes - self._bytes, self._max_bytes // READ_SHARE)

    @property
    def is_open(self) -> bool:
        """Whether a quarter is free: a read costs a statement, and a few rows are not worth it while many wait."""
        return self._rows <= self._max_rows * 3 // 4 and self._bytes <= self._max_bytes * 3 // 4

    def has_room(self, lane: int) -> bool:
        return len(self._sizes[lane]) <= self.lane_quota * 3 // 4

    def has_room_for(self, size: int) -> bool:
        """Whether a row of so many bytes may be read. One larger than a quarter goes when little else is under way."""
        if size <= self._max_bytes // READ_SHARE:
            return self._bytes + size <= self._max_bytes
        return self._bytes <= beside(size, self._max_bytes, self._largest)

    def ids(self, lane: int) -> Collection[int]:
        return self._sizes[lane]

    def add(self, lane: int, rows: Iterable[Row]) -> None:
        """Take rows of one lane in."""
        sizes = {row.id: row.size for row in rows}
        self._sizes[lane] |= sizes
        self._rows += len(sizes)
        self._bytes += sum(sizes.values())

    def forget(self, rows: Iterable[Row]) -> bool:
        """Forget rows; return whether a lane that had no room has some again."""
        opened = False
        settled = 0
        for row in rows:
            of_lane = self._sizes[row.lane]
            size = of_lane.pop(row.id, 0)
            if size:
                self._rows -= 1
                settled += size
                opened |= len(of_lane) == self.lane_quota * 3 // 4
        self._bytes -= settled
        self.settled += settled
        self._max_bytes = min(self._max_bytes + settled, self._most_bytes)
        return opened
