"""The direct way: an event is sent at once, and the broker's confirm accepts it."""

import asyncio
from collections.abc import Callable
from itertools import takewhile
from math import inf

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.probe import Prober
from relay.engine.send.sender import Sender
from relay.engine.send.wire import Wire
from relay.engine.snapshot import CONFIRM_BOUNDS
from relay.observe.histogram import Histogram
from relay.publisher.entry import Entry
from relay.runtime.health import Health, HealthState

LOOK_INTERVAL = 0.25  # seconds
NO_REPEATS: set[int] = set()

Settle = Callable[[Entry, Outcome, str], None]


class Direct:
    """Sends each entry once, and calls `done` with its outcome, at the latest after `confirm_timeout` seconds.

    A link attaches its wire to this object, in place of the engine's sender.

    Args:
        beside: another sender on the same wire, which drains a buffer.
    """

    def __init__(self, done: Settle, health: Health, confirm_timeout: float, *, beside: Sender | None) -> None:
        self._done = done
        self._health = health
        self._confirm_timeout = confirm_timeout
        self._beside = beside
        self._wire: Wire | None = None
        self._under_way: dict[int, Entry] = {}  # in flight, by the row's id, in sending order
        self._given_up: set[int] = set()  # ids that were given up, and whose outcome the wire will still report
        self._loop = asyncio.get_running_loop()
        self.confirm_times = beside.confirm_times if beside is not None else Histogram(CONFIRM_BOUNDS)

    @property
    def is_open(self) -> bool:
        """Whether the broker is known to take events."""
        return self._wire is not None and self._health.state is HealthState.OK

    @property
    def in_flight(self) -> int:
        return len(self._under_way) + (self._beside.in_flight if self._beside is not None else 0)

    def send(self, entry: Entry) -> None:
        """Send an entry; only while it `is_open`."""
        assert self._wire is not None, "is_open was asked"  # noqa: S101
        entry.sent_at = self._loop.time()
        self._under_way[entry.row.id] = entry
        self._wire.send((entry.row,), NO_REPEATS)

    def attach(self, wire: Wire | None) -> None:
        self._wire = wire
        if self._beside is not None:
            self._beside.attach(wire)

    def attach_prober(self, prober: Prober | None) -> None:
        if self._beside is not None:
            self._beside.attach_prober(prober)

    def settle(self, settled: Settled) -> None:
        others: list[Row] = []
        for row in settled.rows:
            if (entry := self._under_way.pop(row.id, None)) is not None:
                self._done(entry, settled.outcome, settled.reason)
            elif row.id in self._given_up:
                self._given_up.remove(row.id)
            else:
                others.append(row)
        if others and self._beside is not None:
            self._beside.settle(settled._replace(rows=others))

    async def run(self) -> None:
        """Give up the entries that are not confirmed in time, until cancelled.

        The link's time-out stands still while the broker blocks publishing; this one goes on.
        """
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            self.give_up(self._loop.time() - self._confirm_timeout)

    def give_up(self, sent_until: float = inf) -> None:
        """Give up the entries that were sent until then; the broker may have them."""
        late = takewhile(lambda entry: entry.sent_at <= sent_until, self._under_way.values())
        for entry in list(late):
            del self._under_way[entry.row.id]
            self._given_up.add(entry.row.id)
            self._done(entry, Outcome.UNKNOWN, f"no confirm within {self._confirm_timeout:g} s")

    def abandon(self) -> list[Entry]:
        """Return the entries in flight, and forget them: their outcomes will not come."""
        entries = list(self._under_way.values())
        self._under_way.clear()
        return entries
