"""Keys that wait because their first row backs off for a fault of its own.

Neither that row nor those behind it are kept in memory: a few such keys would fill the window, and nobody else's rows
would be read. What is kept is from where to read again when the wait is over. The table decides what is found there:
the first row with its attempts, the rows behind it in order, or nothing of it when an operator took it out.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import itemgetter

from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.row import Key, Row

wait_of = itemgetter(Row._fields.index("backoff_ms"))


@dataclass(slots=True)
class Wait:
    """Of one key."""

    lane: int
    first: int  # the lowest id that was read of it
    until: float  # time.monotonic()


class BackingOff:
    """The keys that wait, and what is read of them meanwhile; a row that holds no key waits alone."""

    def __init__(self, policy: DeliveryPolicy) -> None:
        self._policy = policy
        self._waits: dict[Key | None, Wait] = {}  # never of None, which asks for no order

    def add(self, row: Row, until: float, followers: Iterable[Row] = ()) -> None:
        """This row backs off; those that were to be sent behind it have lower ids when they came to light late."""
        if self._policy.backoff_holds_key and row.key is not None:
            self._waits[row.key] = Wait(row.lane, min(each.id for each in (row, *followers)), until)

    def holds(self, row: Row) -> bool:
        """Tell whether a row is not to be sent yet."""
        return bool(row.backoff_ms) or row.key in self._waits

    def keys(self) -> Collection[Key]:
        """Give the keys that wait."""
        return [key for key in self._waits if key is not None]

    def hold_rows(self, window: list[Row], read_at: float) -> tuple[list[Row], list[Row]]:
        """Part what was read by then into the rows to send and those that are read again later."""
        if not self._waits and not any(map(wait_of, window)):
            return window, []
        free: list[Row] = []
        held: list[Row] = []
        for row in window:
            if (wait := self._waits.get(row.key)) is not None:
                wait.first = min(wait.first, row.id)
                held.append(row)
            elif row.backoff_ms:  # it has failed in another session
                self.add(row, read_at + row.backoff_ms / 1000)
                held.append(row)
            else:
                free.append(row)
        return free, held

    def end(self, now: float) -> list[tuple[int, int]]:
        """Let the keys go whose wait is over, and give lane and id from which they are to be read again.

        Call it when nothing is read and not yet offered: the later rows of such a key must not come before the first.
        """
        over = {key: wait for key, wait in self._waits.items() if wait.until <= now}
        for key in over:
            del self._waits[key]
        return [(wait.lane, wait.first) for wait in over.values()]

    def forget(self, lanes: Collection[int]) -> None:
        """These lanes were somebody else's in between."""
        self._waits = {key: wait for key, wait in self._waits.items() if wait.lane not in lanes}
