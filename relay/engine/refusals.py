"""Where the broker takes nothing for now: which addresses, and for how long already.

A queue that elects its leader refuses for half a second, which is not worth a word. One without a quorum refuses, or
keeps silent, until it has one again; neither another host nor another connection helps then, so say which it is.
"""

from collections.abc import Iterable

from relay.engine.health import Health
from relay.engine.routes import Address, Router
from relay.engine.row import Outcome, Row, Settled

PART = "queues"
TOLD_AFTER = 5.0  # seconds without a confirm
FORGOTTEN_AFTER = 30.0  # seconds; its rows are no longer ours, else they had been sent again


class Refusals:
    """Addresses with rows that were sent and not taken, until the first of them is."""

    def __init__(self, router: Router, health: Health) -> None:
        self._router = router
        self._health = health
        self._times: dict[Address, tuple[float, float]] = {}  # when first, when last

    def note(self, settled: Settled, now: float) -> None:
        """Learn from an outcome; costs nothing while every queue takes what it gets."""
        if settled.outcome is Outcome.NACKED:
            self.add(settled.rows, now)
        elif self._times and settled.outcome is Outcome.CONFIRMED:
            for row in settled.rows:
                self._times.pop(self._router.address(row), None)

    def add(self, rows: Iterable[Row], now: float, *, since: float | None = None) -> None:
        """These were not taken, the oldest of them `since` then."""
        for address in {self._router.address(row) for row in rows}:
            first, _ = self._times.get(address, (now if since is None else since, now))
            self._times[address] = (first, now)

    @property
    def since(self) -> float | None:
        """When the first of them was refused; None while every queue takes what it gets."""
        return min((first for first, _ in self._times.values()), default=None)

    def tell(self, now: float) -> None:
        """Let the operator know, or know that it is over."""
        self._times = {at: times for at, times in self._times.items() if now - times[1] < FORGOTTEN_AFTER}
        lasting = [address for address, (first, _) in self._times.items() if now - first >= TOLD_AFTER]
        if lasting:
            more = f", and {len(lasting) - 1} more" if len(lasting) > 1 else ""
            self._health.degrade(PART, f"no quorum for {_place(lasting[0])}, or it is full: nothing is confirmed{more}")
        else:
            self._health.heal(PART)


def _place(address: Address) -> str:
    routing_key = address.routing_key.decode()
    if not address.exchange:
        return f"queue {routing_key!r}"
    return f"a queue behind exchange {address.exchange.decode()!r} with routing key {routing_key!r}"
