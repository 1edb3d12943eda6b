"""Ask for each exchange before sending rows to it, once an exchange has closed the channel that all rows share.

The broker closes the channel over each message for a missing or forbidden exchange. All other rows in flight on that
channel then go out again. A writer may name a different exchange in each row. 300 such rows closed 300 channels, and
rows for other exchanges had a p99 of 8 s. So after the first such close the relay asks for each exchange on a separate
channel (probe.py), and sends only rows whose exchange works. Then the p99 was 0.3 s, with one closed channel.

The relay sends no row to find out. A row on another channel would count as in flight, and could overtake rows of its
key on the shared channel. Until the answer comes, a row waits unsent in the send queue.
"""

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import NamedTuple

from relay.engine.row import Address, Key, Row
from relay.engine.send.message import UnsendableError
from relay.engine.send.probe import Prober
from relay.engine.send.routes import Router
from relay.engine.send.wire import forbids_topic

QUIET_AFTER = 30.0  # seconds without a missing or forbidden exchange, after which the relay stops asking
MOST_WORKING = 10_000  # remembered answers: writers name exchanges and topics, and may name many

Subject = bytes | Address  # the relay asks for an exchange, or for an address where the broker forbids topics


class Checked(NamedTuple):
    """Rows that waited for an answer, after the answer."""

    free: list[Row]  # may be sent, in order
    refused: list[Row]  # the broker takes no message for their address
    behind: dict[Key, list[Row]]  # by key, in order: rows that came after a refused row of their key
    reason: str  # in the broker's words


class ExchangeChecks:
    """The rows of one sender that wait until the broker says whether their exchange works.

    Rows of one key leave in the order in which they came.

    Args:
        on_answer: takes the rows that waited for an answer.
    Attributes:
        is_on: whether rows must pass `lets_go`.
    """

    def __init__(self, on_answer: Callable[[Checked], None]) -> None:
        self._on_answer = on_answer
        self._refused_at = 0.0  # monotonic; when the last missing or forbidden exchange was found
        self._working: set[Subject] = set()
        self._by_topic: set[bytes] = set()  # exchanges in which the broker forbids a topic
        self._asked: set[Subject] = set()
        self._waiting: dict[Subject, list[Row]] = {}
        self._keys: dict[Key, Subject] = {}  # of the rows that wait
        self.is_on = False

    def __len__(self) -> int:
        """Return how many rows wait."""
        return sum(map(len, self._waiting.values()))

    def begin(self, address: Address, reason: str) -> None:
        """Ask for each exchange from now on, as this address has closed the channel for this reason."""
        self.is_on = True
        self._working.clear()
        self._note_refused(address, reason)

    def end_if_quiet(self) -> None:
        """Stop asking when no exchange was missing or forbidden for `QUIET_AFTER`."""
        if monotonic() - self._refused_at >= QUIET_AFTER and not self._waiting:
            self.is_on = False
            self._by_topic.clear()

    def lets_go(self, row: Row, prober: Prober) -> bool:
        """Whether the row may be sent; otherwise it waits for the answer."""
        key = row.key
        subject = self._keys.get(key) if key is not None else None  # set when an earlier row of its key waits
        if subject is None:
            router = prober.router
            try:
                address = router.allowed_address(row)
                subject = address if address.exchange in self._by_topic else address.exchange
                if subject in self._working:
                    return True
                if subject not in self._asked:
                    # Writers may name thousands of exchanges. The settings name few, and most rows go to these.
                    at_once = subject in router.own_exchanges
                    prober.ask(address, partial(self._answer, subject, address, router), at_once=at_once)
                    self._asked.add(subject)
            except UnsendableError:
                return True  # the wire refuses it
        self._waiting.setdefault(subject, []).append(row)
        if key is not None:
            self._keys[key] = subject
        return False

    def take_back(self) -> list[Row]:
        """Remove and return the rows that wait, in order."""
        rows = [row for waiting in self._waiting.values() for row in waiting]
        self._waiting.clear()
        self._keys.clear()
        return rows

    def forget_answers(self) -> None:
        """Forget the answers of this connection; the next one may lead to another broker."""
        self._working.clear()
        self._asked.clear()

    def _answer(self, subject: Subject, address: Address, router: Router, refusal: str) -> None:
        if subject not in self._asked:  # the answer is from a connection that has ended
            return
        self._asked.remove(subject)
        waiting = self._waiting.pop(subject, [])
        for row in waiting:
            if row.key is not None:
                self._keys.pop(row.key, None)
        if not refusal:
            if len(self._working) >= MOST_WORKING:
                self._working.clear()
            self._working.add(subject)
            self._on_answer(Checked(waiting, [], {}, ""))
            return
        self._note_refused(address, refusal)
        checked = Checked([], [], {}, refusal)
        for row in waiting:
            own = router.address(row)
            if own == address if forbids_topic(refusal) else own.exchange == address.exchange:
                checked.refused.append(row)
                if row.key is not None:
                    checked.behind.setdefault(row.key, [])
            elif row.key in checked.behind:
                checked.behind[row.key].append(row)
            else:
                checked.free.append(row)
        self._on_answer(checked)

    def _note_refused(self, address: Address, reason: str) -> None:
        self._refused_at = monotonic()
        if forbids_topic(reason):
            self._by_topic.add(address.exchange)
