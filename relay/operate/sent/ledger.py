"""How far a replay is: which rows are settled, and up to which id all of them are."""

from collections import deque
from collections.abc import Iterable, Sequence

from relay.engine.row import Row
from relay.jobs.work import RowFailure


class Ledger:
    """The rows handed over, in id order, until they and all before them are settled.

    Rows settle out of order. Saved is the position below which nothing is left, with the counts up to there. A run that
    resumes there sends some messages twice, misses no message, and counts each once.

    Attributes:
        position: every row up to this id is settled.
        replayed, failed: how many of them the broker confirmed, and how many it refused, since `take`.
        failures: the refused ones that are still to be saved.
        bytes: size of the rows above the position.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.replayed = self.failed = 0
        self.failures: list[RowFailure] = []
        self.bytes = 0
        self._order: deque[tuple[int, int]] = deque()  # (id, size)
        self._settled: dict[int, RowFailure | None] = {}

    @property
    def rows(self) -> int:
        """Rows that were handed over and not taken."""
        return len(self._order) + self.replayed + self.failed

    @property
    def is_under_way(self) -> bool:
        """Whether a row is above the position."""
        return bool(self._order)

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
        self._settled[row.id] = RowFailure(row.id, row.message_id.decode(), reason)
        self._advance()

    def take(self, replayed: int, failed: int) -> None:
        """These rows are counted elsewhere."""
        self.replayed -= replayed
        self.failed -= failed

    def saved(self, failures: Sequence[RowFailure]) -> None:
        """These first failures are saved."""
        del self.failures[: len(failures)]

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
