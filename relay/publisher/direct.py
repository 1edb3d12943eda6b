"""The direct way: an event is sent at once, and is accepted by the broker's confirm."""

import asyncio
from collections.abc import Callable
from itertools import takewhile
from math import inf

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.probe import Prober
from relay.engine.send.publisher import Publisher
from relay.engine.send.wire import Wire
from relay.engine.snapshot import CONFIRM_BOUNDS
from relay.observe.histogram import Histogram
from relay.publisher.entry import Unaccepted
from relay.runtime.health import Health, HealthState

OVERDUE_LOOK = 0.25  # seconds
NO_REPEATS: set[int] = set()

Settle = Callable[[Unaccepted, Outcome, str], None]


class Direct:
    """Sends each entry once; what became of it comes by `done`, at the latest after `confirm_timeout` seconds.

    It is what a link attaches its wire to, in place of the engine's publisher.

    Args:
        beside: sends what it has, too, by the same wire: the drain of a buffer.
    """

    def __init__(self, done: Settle, health: Health, confirm_timeout: float, *, beside: Publisher | None) -> None:
        self._done = done
        self._health = health
        self._confirm_timeout = confirm_timeout
        self._beside = beside
        self._wire: Wire | None = None
        self._under_way: dict[int, Unaccepted] = {}  # by the row's id, in sending order
        self._given_up: set[int] = set()  # of these the wire is still to say what became of them
        self._loop = asyncio.get_running_loop()
        self.confirm_times = beside.confirm_times if beside is not None else Histogram(CONFIRM_BOUNDS)

    @property
    def is_open(self) -> bool:
        """Return whether the broker is known to take what it is given."""
        return self._wire is not None and self._health.state is HealthState.OK

    @property
    def in_flight(self) -> int:
        return len(self._under_way) + (self._beside.in_flight if self._beside is not None else 0)

    def send(self, entry: Unaccepted) -> None:
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
        """Give up what is not confirmed in time, until cancelled.

        The link's own time-out stands still while the broker blocks us, and the publisher must not.
        """
        while True:
            await asyncio.sleep(OVERDUE_LOOK)
            self.give_up(self._loop.time() - self._confirm_timeout)

    def give_up(self, sent_until: float = inf) -> None:
        """Wait no more for what was sent until then: it may have arrived."""
        late = takewhile(lambda entry: entry.sent_at <= sent_until, self._under_way.values())
        for entry in list(late):
            del self._under_way[entry.row.id]
            self._given_up.add(entry.row.id)
            self._done(entry, Outcome.UNKNOWN, f"no confirm within {self._confirm_timeout:g} s")

    def abandon(self) -> list[Unaccepted]:
        """Return what is under way, of which nothing will be heard any more."""
        entries = list(self._under_way.values())
        self._under_way.clear()
        return entries
