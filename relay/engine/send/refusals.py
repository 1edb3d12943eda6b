"""Where the broker takes nothing for now: which addresses, and for how long already.

A queue that elects its leader refuses for half a second, which is not worth a word. A queue that is full, or without a
quorum, refuses or keeps silent until an operator mends it. Its rows must not fill the window meanwhile. A channel that
has sent a few dozen messages to a queue without a leader waits for it, and so do all other queues of the channel.
So the relay takes such an address for a route that does not work (quarantine.py).
"""

import asyncio
from collections.abc import Iterable
from math import inf

from relay.engine.health import Health
from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.routes import Address, Router
from relay.engine.send.wire import Settle

PART = "queues"
LASTING_AFTER = 5.0  # seconds without a confirm
FORGOTTEN_AFTER = 30.0  # seconds; its rows are no longer ours, else they had been sent again


class Refusals:
    """Addresses whose rows were sent and not taken, until the broker takes a row of the address.

    Args:
        settle: gets every outcome, as the sender must act on it.
        barring: whether rows of an address that has taken nothing for long are settled as `BARRED`. Otherwise they are
            tried for ever, and the operator is told.
    Attributes:
        confirmed_at: when the broker last took a row, by the event loop's clock.
    """

    def __init__(self, router: Router, health: Health, settle: Settle, *, barring: bool) -> None:
        self._router = router
        self._health = health
        self._settle = settle
        self._barring = barring
        self._clock = asyncio.get_running_loop().time
        self._times: dict[Address, tuple[float, float]] = {}  # when first, when last
        self.confirmed_at = -inf

    def settle(self, settled: Settled) -> None:
        """Learn from an outcome and pass it on. A wire calls this; it costs nothing while every queue takes all."""
        now = self._clock()
        if settled.outcome is Outcome.CONFIRMED:
            self.confirmed_at = now
            if self._times:
                for row in settled.rows:
                    self._times.pop(self._router.address(row), None)
        elif settled.outcome is Outcome.NACKED:
            self._add(settled.rows, now, since=now)
            if self._barring and (lasting := self._lasting(now)):
                reason = f"refused for {LASTING_AFTER:g} s (basic.nack): the queue is full, or it has no quorum"
                self._bar(settled, lasting, reason)
                return
        self._settle(settled)

    def settle_overdue(self, lost: Settled, late: Iterable[Row], seconds: float) -> None:
        """Pass on the rows of a channel on which no confirm came for so many seconds.

        Args:
            late: the rows that waited long enough to show that their address takes nothing. That may be wrong: then
                the first probe of the address shows that it works.
        """
        if self._barring:
            self._bar(lost, {self._router.address(row) for row in late}, f"no confirm within {seconds:g} s")
        else:
            now = self._clock()
            self._add(lost.rows, now, since=now - seconds)
            self._settle(lost)

    @property
    def since(self) -> float | None:
        """When the broker refused the first of these addresses; None while every queue takes what it gets."""
        return min((first for first, _ in self._times.values()), default=None)

    def report(self) -> None:
        """Report to the operator what lasts, or that it is over."""
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

    def _bar(self, settled: Settled, addresses: Iterable[Address], reason: str) -> None:
        """Settle the rows of these addresses as barred, and the others as they are."""
        barred: dict[Address, list[Row]] = {address: [] for address in addresses}
        others: list[Row] = []
        for row in settled.rows:
            barred.get(self._router.address(row), others).append(row)
        for address, rows in barred.items():
            if rows:
                self._times.pop(address, None)
                self._settle(Settled(rows, Outcome.BARRED, reason))
        if others:
            self._settle(settled._replace(rows=others))


def _place(address: Address) -> str:
    routing_key = address.routing_key.decode()
    if not address.exchange:
        return f"queue {routing_key!r}"
    return f"a queue behind exchange {address.exchange.decode()!r} with routing key {routing_key!r}"
