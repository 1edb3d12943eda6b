"""Keys that wait because their first row backs off.

Neither that row nor the rows behind it are kept in memory: a few such keys would fill the window, and no other rows
would be read. Only the place from which to read again is kept. The table decides what is found there: the first row
with its attempts, the rows behind it in order, or no row when an operator has removed them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import itemgetter

from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.row import Key, Row

wait_of = itemgetter(Row._fields.index("backoff_ms"))


@dataclass(slots=True)
class Wait:
    """The wait of one key."""

    lane: int
    first: int  # the lowest id that was read of it
    until: float  # time.monotonic()


class BackingOff:
    """The keys that wait, and what is read of them meanwhile; a row that holds no key waits alone."""

    def __init__(self, policy: DeliveryPolicy) -> None:
        self._policy = policy
        self._waits: dict[Key | None, Wait] = {}  # never of None, which asks for no order

    def add(self, row: Row, until: float, followers: Iterable[Row] = ()) -> None:
        """Let a row back off, and its key if it holds one. A follower that became visible late may have a lower id."""
        if self._policy.backoff_holds_key and row.key is not None:
            self._waits[row.key] = Wait(row.lane, min(each.id for each in (row, *followers)), until)

    def holds(self, row: Row) -> bool:
        """Whether a row must not be sent yet."""
        return bool(row.backoff_ms) or row.key in self._waits

    def keys(self) -> Collection[Key]:
        """Return the keys that wait."""
        return [key for key in self._waits if key is not None]

    def hold_rows(self, window: list[Row], read_at: float) -> tuple[list[Row], list[Row]]:
        """Split rows that were read at that moment into those to send now and those to read again later."""
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
        """Forget the keys whose wait is over; return the lane and the id from which to read each of them again.

        Call it when every row that was read is offered: the later rows of such a key must not come before the first.
        """
        over = {key: wait for key, wait in self._waits.items() if wait.until <= now}
        for key in over:
            del self._waits[key]
        return [(wait.lane, wait.first) for wait in over.values()]

    def forget(self, lanes: Collection[int]) -> None:
        """Forget the keys of these lanes, which another node held in between."""
        self._waits = {key: wait for key, wait in self._waits.items() if wait.lane not in lanes}
