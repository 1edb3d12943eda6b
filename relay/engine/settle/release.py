"""Which routes in quarantine are due, and which leave it on trust: decisions only, no statement and no waiting.

A lost binding such as `order.#` brings thousands of routing keys into quarantine. Tried one by one, they would leave as
slowly as they are tried. So when a probe has worked, the rows of two more routes of its exchange go without a probe.
When the broker has taken them, the rows of four more go, and so on. When one of them comes back, that ends: the next
routes of the exchange go when another probe has worked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from relay.engine.row import Address, Place, Row

ROUTES_PER_ROUND = 250  # that go on trust at once, at most
ROUND_WITHIN = 5.0  # seconds; rows that the broker has not taken by then are no reason to trust


class Agenda:
    """Addresses by the moment at which they are due. Each has one moment; a new one replaces it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Address]] = []
        self._moments: dict[Address, tuple[float, int]] = {}
        self._number = count()

    def put(self, address: Address, at: float) -> None:
        """Make an address due at that moment."""
        number = next(self._number)
        self._moments[address] = at, number
        heappush(self._heap, (at, number, address))

    def drop(self, address: Address) -> None:
        """Forget an address."""
        self._moments.pop(address, None)

    def take(self, now: float, most: int) -> list[Address]:
        """Remove the addresses that are due, and return them: at most so many, the earliest first."""
        taken: list[Address] = []
        while len(taken) < most and self.next_at <= now:
            taken.append(heappop(self._heap)[2])
            self.drop(taken[-1])
        return taken

    @property
    def next_at(self) -> float:
        """The moment at which the first address is due."""
        while self._heap and self._moments.get(self._heap[0][2]) != self._heap[0][:2]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf


@dataclass(slots=True)
class Round:
    """The routes of an exchange that went last."""

    worked: Address  # the probe's: routes that begin with the same word go first
    routes: int = 1
    rows: set[Place] = field(default_factory=set)  # of them, those that the broker has not taken yet
    ends_at: float = inf


class Trust:
    """How many routes of an exchange may go without a probe. True while some exchange is trusted."""

    def __init__(self) -> None:
        self._rounds: dict[bytes, Round] = {}  # by exchange
        self._exchanges: dict[Place, bytes] = {}  # of the rows that the broker has not taken yet

    def __bool__(self) -> bool:
        return bool(self._rounds)

    @property
    def next_at(self) -> float:
        """The moment at which `next_round` may have an answer."""
        return min((each.ends_at if each.rows else 0.0 for each in self._rounds.values()), default=inf)

    def begin(self, worked: Address) -> None:
        """Trust an exchange, as a probe for this address has worked."""
        self._rounds.setdefault(worked.exchange, Round(worked))

    def next_round(self, now: float, routes: Mapping[Address, bool]) -> list[Address]:
        """Return the addresses of one exchange that may go now. None are left, or a round is under way: empty.

        Args:
            routes: the addresses in quarantine, and whether each may go without a probe.
        """
        for exchange, last in list(self._rounds.items()):
            if last.rows and now < last.ends_at:
                continue
            if not last.rows and (chosen := _chosen(routes, last)):
                return chosen
            self.end(exchange)
        return []

    def go(self, addresses: list[Address], rows: Iterable[Place], now: float) -> None:
        """Note that these rows are on their way, of the addresses that `next_round` has returned."""
        exchange = addresses[0].exchange
        gone = self._rounds[exchange]
        gone.routes, gone.rows, gone.ends_at = len(addresses), set(rows), now + ROUND_WITHIN
        self._exchanges.update(dict.fromkeys(gone.rows, exchange))

    def note_sent(self, rows: Iterable[Row]) -> bool:
        """Note that the broker has taken these rows; return whether that was a whole round."""
        is_over = False
        for row in rows if self._exchanges else ():
            place = row.lane, row.id
            if (exchange := self._exchanges.pop(place, None)) is not None:
                last = self._rounds[exchange]
                last.rows.discard(place)
                is_over |= not last.rows
        return is_over

    def note_returned(self, rows: Iterable[Row]) -> None:
        """End the trust in the exchanges of those rows that were on their way."""
        for row in rows:
            if (exchange := self._exchanges.get((row.lane, row.id))) is not None:
                self.end(exchange)

    def end(self, exchange: bytes) -> None:
        """Trust an exchange no longer."""
        for place in self._rounds.pop(exchange).rows:
            self._exchanges.pop(place, None)

    def clear(self) -> None:
        """Trust no exchange."""
        self._rounds.clear()
        self._exchanges.clear()


def _chosen(routes: Mapping[Address, bool], last: Round) -> list[Address]:
    """Return twice as many addresses as went last. A binding is often for all routing keys that begin alike."""
    word = first_word(last.worked)
    alike: list[Address] = []
    others: list[Address] = []
    for address, may_go in routes.items():
        if may_go and address.exchange == last.worked.exchange:
            (alike if first_word(address) == word else others).append(address)
    return [*alike, *others][: min(2 * last.routes, ROUTES_PER_ROUND)]


def first_word(address: Address) -> bytes:
    return address.routing_key.partition(b".")[0]
