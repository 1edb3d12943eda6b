"""Send to an address that refuses rows (basic.nack) one row after a growing wait, then as many as it takes.

A full queue with `overflow = "reject-publish"` makes the broker refuse a message that the other queues of the exchange
have taken. Each try puts one more copy into those, so rows that would be refused should not be sent at all. As in TCP's
slow start, a row that is taken makes room for two. Then a full queue whose consumer works stays full with few refusals,
and one without a consumer costs a copy for each wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from relay.engine.row import Address, Key, Outcome, Row, Settled
from relay.runtime.backoff import backoff

# Seconds until the next try. The first is short: a queue of 100 whose consumer takes 5,000 a second is empty after 20
# ms. The steps are large: about six tries in the 5 s until the route goes to quarantine.
WAIT, WAIT_MAX, WAIT_FACTOR = 0.01, 2.0, 4.0
GROWTH = 0.125  # of the room, for each row that is taken, when twice the room would be too much
MOST_IDLE = 10_000  # remembered addresses for which no row waits


@dataclass(slots=True, eq=False)
class Line:
    """The rows of one address that wait until it takes more.

    Attributes:
        room: rows that may be under way; 0 during a wait.
        most: the room up to which it doubles: half of what was too much.
        refusals: since a row was taken.
        has_taken_new: whether a row that was never refused has been taken since the last wait.
        under_way: by id, whether the row was refused before. Rows from before the last wait do not count.
    """

    address: Address
    room: float = 0.0
    most: float = inf
    refusals: int = 0
    has_taken_new: bool = False
    under_way: dict[int, bool] = field(default_factory=dict)
    new: deque[Row] = field(default_factory=deque)
    refused: deque[Row] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.new) + len(self.refused)


class Backpressure:
    """The addresses that have refused rows, each until it takes rows again.

    Args:
        enough: rows under way, from which on an address needs no line.
        by_key: whether a row is offered only when all earlier rows of its key are settled. Otherwise it waits behind
            the new row of its key that waits.
        on_due: called after a wait, when rows may go.
    Attributes:
        lines: by address; all rows may go while it is empty.
        due: the lines of which rows may go.
    """

    def __init__(self, enough: int, *, by_key: bool, on_due: Callable[[], None]) -> None:
        self._enough = enough
        self._by_key = by_key
        self._on_due = on_due
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, Line] = {}  # by the id of a row
        self._keys: dict[Key, list[Line]] = {}  # an entry for each new row that waits; unused by key
        self.lines: dict[Address, Line] = {}
        self.due: dict[Line, None] = {}

    def __len__(self) -> int:
        """Return how many rows wait."""
        return sum(map(len, self.lines.values()))

    def take(self, most: int) -> list[Row]:
        """Remove and return up to `most` rows that may go."""
        taken: list[Row] = []
        while self.due and len(taken) < most:
            line = next(iter(self.due))
            # In turns: new rows must pass refused repeats, and refused rows must not wait for the end of a backlog.
            was_refused = bool(line.refused) and not (line.new and len(taken) % 2 == 0)
            row = line.refused.popleft() if was_refused else self._take_new(line)
            self._count(line, row, was_refused=was_refused)
            taken.append(row)
        return taken

    def lets_go(self, row: Row, address: Address, *, was_refused: bool) -> bool:
        """Whether a row may be sent; otherwise it waits in line."""
        behind = self._keys.get(row.key) if row.key is not None else None
        line = behind[0] if behind else self.lines.get(address)
        if line is None:
            return True
        if not len(line) and len(line.under_way) < int(line.room):
            self._count(line, row, was_refused=was_refused)
            return True
        if was_refused:
            line.refused.append(row)
        else:
            line.new.append(row)
            if not self._by_key and row.key is not None:
                self._keys.setdefault(row.key, []).append(line)
        self._look_at(line)
        return False

    def refuse(self, row: Row, address: Address, *, again: bool) -> bool:
        """Let a row wait in line that the broker has refused.

        Args:
            again: whether the broker had refused this row before, since it was offered.
        Returns:
            False when the row does not wait here, as it alone is refused: the address takes new rows. A deduplicating
            queue refuses repeats in this way.
        """
        line = self._under_way.get(row.id)
        if line is not None:
            if line.under_way[row.id] and line.has_taken_new:
                self._discount(line, row.id)
                return False
            self._wait(line)
        elif (line := self.lines.get(address)) is None:
            if again:
                return False
            if len(self.lines) >= MOST_IDLE:
                self.lines = {at: line for at, line in self.lines.items() if len(line) or line.under_way}
            line = self.lines[address] = Line(address)
            self._wait(line)
        line.refused.append(row)
        return True

    def note(self, settled: Settled) -> None:
        """Note any outcome but a refusal."""
        for row in settled.rows:
            if (line := self._under_way.get(row.id)) is None:
                continue
            if settled.outcome is Outcome.CONFIRMED:
                line.has_taken_new |= not line.under_way[row.id]
                line.refusals = 0
                line.room += 1 if line.room < line.most else GROWTH
                self._discount(line, row.id)
            else:
                self._wait(line)

    def take_back(self) -> list[Row]:
        """Remove and return the rows that wait, in order. Their addresses stay known."""
        rows = [row for line in self.lines.values() for row in (*line.refused, *line.new)]
        for line in self.lines.values():
            line.refused.clear()
            line.new.clear()
        self._keys.clear()
        self.due.clear()
        return rows

    def clear(self) -> None:
        """Forget every row and address."""
        self._under_way.clear()
        self._keys.clear()
        self.lines.clear()
        self.due.clear()

    def _wait(self, line: Line) -> None:
        """Let no row go for a while. Rows under way count no more, as they were sent before."""
        if not line.refusals and line.room:
            line.most = line.room / 2
        line.refusals += 1
        line.room = 0.0
        line.has_taken_new = False
        for id_ in line.under_way:
            del self._under_way[id_]
        line.under_way.clear()
        self.due.pop(line, None)
        seconds = backoff(line.refusals, WAIT, WAIT_MAX, multiplier=WAIT_FACTOR)
        self._loop.call_later(seconds, self._try, line)

    def _try(self, line: Line) -> None:
        if self.lines.get(line.address) is line:
            line.room = 1.0
            self._look_at(line)
            self._on_due()

    def _look_at(self, line: Line) -> None:
        """Note whether rows of this line may go. It ends when its address has taken all, or takes enough."""
        self.due.pop(line, None)  # another line may be the first now
        if len(line):
            if len(line.under_way) < int(line.room):
                self.due[line] = None
        elif not line.refusals and (not line.under_way or line.room > self._enough):
            self.lines.pop(line.address, None)
            for id_ in line.under_way:
                del self._under_way[id_]
            line.under_way.clear()

    def _take_new(self, line: Line) -> Row:
        row = line.new.popleft()
        if not self._by_key and row.key is not None:
            waiting = self._keys[row.key]
            waiting.pop()
            if not waiting:
                del self._keys[row.key]
        return row

    def _count(self, line: Line, row: Row, *, was_refused: bool) -> None:
        line.under_way[row.id] = was_refused
        self._under_way[row.id] = line
        self._look_at(line)

    def _discount(self, line: Line, id_: int) -> None:
        del self._under_way[id_], line.under_way[id_]
        self._look_at(line)
