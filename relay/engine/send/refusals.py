"""Where the broker takes nothing for now: which addresses, and for how long already.

A queue that elects its leader refuses for half a second, which is not worth a word. One that is full, or without a
quorum, refuses or keeps silent until somebody mends it. Its rows must not fill the window meanwhile, and a channel
that has sent a few dozen messages to a queue without a leader waits for it, with all the others: so such an address
is taken for a route that does not work (quarantine.py).
"""

from collections.abc import Iterable

from relay.engine.health import Health
from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.routes import Address, Router

PART = "queues"
LASTING_AFTER = 5.0  # seconds without a confirm
FORGOTTEN_AFTER = 30.0  # seconds; its rows are no longer ours, else they had been sent again


class Refusals:
    """Addresses with rows that were sent and not taken, until the first of them is.

    Args:
        barring: whether rows of an address that has taken nothing for long are settled as `BARRED`; else they are
            tried for ever, and the operator is told.
    """

    def __init__(self, router: Router, health: Health, *, barring: bool) -> None:
        self._router = router
        self._health = health
        self._barring = barring
        self._times: dict[Address, tuple[float, float]] = {}  # when first, when last

    def judge(self, settled: Settled, now: float) -> list[Settled]:
        """Learn from an outcome, and give it as it is to be acted on; costs nothing while every queue takes all."""
        if settled.outcome is Outcome.NACKED:
            self._add(settled.rows, now, since=now)
            if self._barring and (lasting := self._lasting(now)):
                reason = f"refused for {LASTING_AFTER:g} s (basic.nack): the queue is full, or it has no quorum"
                return self._bar(settled, lasting, reason)
        elif self._times and settled.outcome is Outcome.CONFIRMED:
            for row in settled.rows:
                self._times.pop(self._router.address(row), None)
        return [settled]

    def judge_overdue(self, lost: Settled, late: Iterable[Row], seconds: float, now: float) -> list[Settled]:
        """Give the rows of a channel on which no confirm came for so long as they are to be acted on.

        Args:
            late: those of them that waited long enough to say that their address takes nothing. It need not be so:
                an address then shows with its first probe that it works.
        """
        if not self._barring:
            self._add(lost.rows, now, since=now - seconds)
            return [lost]
        return self._bar(lost, {self._router.address(row) for row in late}, f"no confirm within {seconds:g} s")

    @property
    def since(self) -> float | None:
        """When the first of them was refused; None while every queue takes what it gets."""
        return min((first for first, _ in self._times.values()), default=None)

    def tell(self, now: float) -> None:
        """Let the operator know, or know that it is over."""
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

    def _bar(self, settled: Settled, addresses: Iterable[Address], reason: str) -> list[Settled]:
        barred: dict[Address, list[Row]] = {address: [] for address in addresses}
        others: list[Row] = []
        for row in settled.rows:
            barred.get(self._router.address(row), others).append(row)
        judged = [Settled(rows, Outcome.BARRED, reason) for rows in barred.values() if rows]
        for one in judged:
            self._times.pop(self._router.address(one.rows[0]), None)
        return [*judged, settled._replace(rows=others)] if others else judged


def _place(address: Address) -> str:
    routing_key = address.routing_key.decode()
    if not address.exchange:
        return f"queue {routing_key!r}"
    return f"a queue behind exchange {address.exchange.decode()!r} with routing key {routing_key!r}"
