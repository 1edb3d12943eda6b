"""How far a replay is: which rows are settled, and up to which id all of them are."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from relay.engine.row import Row


class Failed(NamedTuple):
    """A row that could not be replayed, and why."""

    id: int
    message_id: bytes
    reason: str


class Ledger:
    """The rows handed over, in id order, until they and all before them are settled.

    Rows settle out of order. Saved is the position below which nothing is left, with the counts up to there. A run that
    resumes there sends some messages twice, misses no message, and counts each once.

    Attributes:
        position: every row up to this id is settled.
        replayed, failed: how many of them the broker confirmed, and how many it refused.
        failures: the refused ones that are still to be saved.
        bytes: size of the rows above the position.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.replayed = self.failed = 0
        self.failures: list[Failed] = []
        self.bytes = 0
        self._order: deque[tuple[int, int]] = deque()  # (id, size)
        self._settled: dict[int, Failed | None] = {}

    @property
    def rows(self) -> int:
        """Rows above the position."""
        return len(self._order)

    def offer(self, rows: Iterable[Row]) -> None:
        """These rows are under way; call it in id order."""
        for row in rows:
            size = row.size
            self._order.append((row.id, size))
            self.bytes += size

    def confirm(self, rows: Iterable[Row]) -> None:
        self._settled.update((row.id, None) for row in rows)
        self._advance()

    def fail(self, row: Row, reason: str) -> None:
        self._settled[row.id] = Failed(row.id, row.message_id, reason)
        self._advance()

    def _advance(self) -> None:
        order, settled = self._order, self._settled
        while order and order[0][0] in settled:
            id_, size = order.popleft()
            failed = settled.pop(id_)
            if failed is None:
                self.replayed += 1
            else:
                self.failed += 1
                self.failures.append(failed)
            self.position = id_
            self.bytes -= size
