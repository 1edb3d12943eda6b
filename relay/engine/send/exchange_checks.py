"""Ask for each exchange before rows are sent to it, once one of them has closed the channel that all rows share.

The broker closes a channel over each message for a missing or forbidden exchange, and what else is in flight on it goes
out again. A writer may name another exchange in each row: 300 of them closed 300 channels, and rows for other exchanges
had a p99 of 8 s. So after the first such close the relay asks for each exchange, on a channel of its own (probe.py),
and only rows whose exchange works go out. The p99 was 0.3 s then, with one closed channel.

No row is sent to find out. A row on another channel could overtake those of its key that are on the shared one, and
counts as in flight. Until the answer comes, a row waits in the send queue as one that was not sent.
"""

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import NamedTuple

from relay.engine.row import Key, Row
from relay.engine.send.message import UnsendableError
from relay.engine.send.probe import Prober
from relay.engine.send.routes import Address, Router
from relay.engine.send.wire import forbids_topic

QUIET_AFTER = 30.0  # seconds without a missing or forbidden exchange, after which the relay asks for none
MOST_WORKING = 10_000  # remembered: writers name exchanges, and topics

Subject = bytes | Address  # what is asked for: an exchange, or an address where the broker forbids topics


class Checked(NamedTuple):
    """Rows that waited for an answer which has come."""

    free: list[Row]  # to be sent, in order
    refused: list[Row]  # the broker takes no message for their address
    reason: str  # in the broker's words


class ExchangeChecks:
    """The rows of one sender that wait until it is known whether their exchange works.

    Rows of one key are given out in the order in which they came.

    Args:
        on_answer: takes the rows that waited for an answer.
    Attributes:
        is_on: whether rows have to pass `lets_go`.
    """

    def __init__(self, on_answer: Callable[[Checked], None]) -> None:
        self._on_answer = on_answer
        self._refused_at = 0.0  # monotonic; when the last missing or forbidden exchange was found
        self._working: set[Subject] = set()
        self._by_topic: set[bytes] = set()  # exchanges of which the broker forbids a topic
        self._asked: set[Subject] = set()
        self._waiting: dict[Subject, list[Row]] = {}
        self._keys: dict[Key, Subject] = {}  # of the rows that wait
        self.is_on = False

    def __len__(self) -> int:
        """Return how many rows wait."""
        return sum(map(len, self._waiting.values()))

    def begin(self, address: Address, reason: str) -> None:
        """Ask for each exchange from now on: the one of this address has closed the channel, for this reason."""
        self.is_on = True
        self._working.clear()
        self._note_refused(address, reason)

    def end_if_quiet(self) -> None:
        """Ask no more when no exchange was missing or forbidden for long."""
        if monotonic() - self._refused_at >= QUIET_AFTER and not self._waiting:
            self.is_on = False
            self._by_topic.clear()

    def lets_go(self, row: Row, prober: Prober) -> bool:
        """Whether the row may be sent; else it waits for the answer."""
        key = row.key
        subject = self._keys.get(key) if key is not None else None  # a row of its key waits, and it waits behind
        if subject is None:
            try:
                address = prober.router.allowed_address(row)
            except UnsendableError:
                return True  # the wire refuses it
            subject = address if address.exchange in self._by_topic else address.exchange
            if subject in self._working:
                return True
            if subject not in self._asked:
                self._asked.add(subject)
                # Writers may name thousands. Those of the settings are few, and most rows are for them.
                done = partial(self._answer, subject, address, prober.router)
                prober.ask(address, done, at_once=row.exchange is None)
        self._waiting.setdefault(subject, []).append(row)
        if key is not None:
            self._keys[key] = subject
        return False

    def take_back(self) -> list[Row]:
        """Return the rows that wait, in order; they wait no more."""
        rows = [row for waiting in self._waiting.values() for row in waiting]
        self._waiting.clear()
        self._keys.clear()
        return rows

    def forget_answers(self) -> None:
        """Forget what this connection has said; another one may lead to another broker."""
        self._working.clear()
        self._asked.clear()

    def _answer(self, subject: Subject, address: Address, router: Router, refusal: str) -> None:
        if subject not in self._asked:  # of a connection that has ended
            return
        self._asked.remove(subject)
        waiting = self._waiting.pop(subject, [])
        for row in waiting:
            if row.key is not None:
                self._keys.pop(row.key, None)
        free, refused = waiting, list[Row]()
        if refusal:
            self._note_refused(address, refusal)
            free = []
            for row in waiting:
                own = router.address(row)
                alike = own == address if forbids_topic(refusal) else own.exchange == address.exchange
                (refused if alike else free).append(row)
        else:
            if len(self._working) >= MOST_WORKING:
                self._working.clear()
            self._working.add(subject)
        self._on_answer(Checked(free, refused, refusal))

    def _note_refused(self, address: Address, reason: str) -> None:
        self._refused_at = monotonic()
        if forbids_topic(reason):
            self._by_topic.add(address.exchange)
