"""Which addresses the broker refuses for now, and since when.

A queue that elects its leader refuses for half a second, and the operator need not know. A queue that is full or has no
quorum refuses, or does not answer, until an operator repairs it. Its rows must not fill the window meanwhile.
After a few dozen messages to a queue without a leader, the channel waits for that queue. Then no other queue of the
channel gets messages. So the relay treats such an address as a route that does not work (quarantine.py).
"""

import asyncio
from collections.abc import Callable, Iterable
from math import inf

from relay.engine.row import Address, Outcome, Row, Settled
from relay.engine.send.routes import Router
from relay.engine.send.wire import Settle
from relay.runtime.health import Health

PART = "queues"
LASTING_AFTER = 5.0  # seconds without a confirm
FORGOTTEN_AFTER = 30.0  # seconds without a refusal: this node has lost the rows, or it would have sent them again


class Refusals:
    """The addresses that refuse rows, each until the broker takes a row for it.

    Args:
        settle: gets every outcome; the sender must act on it.
        barring: whether rows settle as `BARRED` when their address has taken nothing for long. Otherwise the relay
            tries them without end, and reports it to the operator.
    Attributes:
        confirmed_at: when the broker last took a row, by the event loop's clock.
    """

    def __init__(self, router: Router, health: Health, settle: Settle, *, barring: bool) -> None:
        self._router = router
        self._health = health
        self._settle = settle
        self._barring = barring
        self._clock = asyncio.get_running_loop().time
        self._times: dict[Address, tuple[float, float]] = {}  # the first and the last refusal
        self.confirmed_at = -inf

    def settle(self, settled: Settled) -> None:
        """Note an outcome, and pass it on. A wire calls this; it costs nothing while no queue refuses."""
        now = self._clock()
        if settled.outcome is Outcome.CONFIRMED:
            self.confirmed_at = now
            if self._times:
                for row in settled.rows:
                    self._times.pop(self._router.address(row), None)
        elif settled.outcome is Outcome.NACKED:
            self._add(settled.rows, now, since=now)
            if self._barring and (lasting := self._lasting(now)):
                self._bar(settled, lasting, _refused)
                return
        self._settle(settled)

    def settle_overdue(self, lost: Settled, late: Iterable[Row], seconds: float) -> None:
        """Pass on the rows of a channel on which no confirm came for this number of seconds.

        Args:
            late: rows that have waited so long that their address seems to take nothing. If it works after all, its
                first probe shows that.
        """
        if self._barring:
            addresses = {self._router.address(row) for row in late}
            self._bar(lost, addresses, lambda _: f"no confirm within {seconds:g} s")
        else:
            now = self._clock()
            self._add(lost.rows, now, since=now - seconds)
            self._settle(lost)

    @property
    def since(self) -> float | None:
        """When the broker first refused one of these addresses; None while no queue refuses."""
        return min((first for first, _ in self._times.values()), default=None)

    def report(self) -> None:
        """Report refusals that last to the operator, or that they are over."""
        now = self._clock()
        self._times = {at: times for at, times in self._times.items() if now - times[1] < FORGOTTEN_AFTER}
        lasting = [] if self._barring else self._lasting(now)
        if lasting:
            more = f", and {len(lasting) - 1} more" if len(lasting) > 1 else ""
            self._health.degrade(PART, f"no quorum for {_place(lasting[0])}, or it is full: nothing is confirmed{more}")
        else:
            self._health.heal(PART)

    def _lasting(self, now: float) -> list[Address]:
        return [address for address, (first, _) in self._times.items() if now - first >= LASTING_AFTER]

    def _add(self, rows: Iterable[Row], now: float, *, since: float) -> None:
        for address in {self._router.address(row) for row in rows}:
            first, _ = self._times.get(address, (since, now))
            self._times[address] = (first, now)

    def _bar(self, settled: Settled, addresses: Iterable[Address], reason_of: Callable[[Address], str]) -> None:
        """Settle the rows of these addresses as barred, and pass on the others with their own outcome."""
        barred: dict[Address, list[Row]] = {address: [] for address in addresses}
        others: list[Row] = []
        for row in settled.rows:
            barred.get(self._router.address(row), others).append(row)
        for address, rows in barred.items():
            if rows:
                self._times.pop(address, None)
                self._settle(Settled(rows, Outcome.BARRED, reason_of(address)))
        if others:
            self._settle(settled._replace(rows=others))


def _refused(address: Address) -> str:
    return f"refused for {LASTING_AFTER:g} s (basic.nack): {_place(address)} is full, or has no quorum"


def _place(address: Address) -> str:
    routing_key = address.routing_key.decode()
    if not address.exchange:
        return f"queue {routing_key!r}"
    return f"a queue behind exchange {address.exchange.decode()!r} with routing key {routing_key!r}"
