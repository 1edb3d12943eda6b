"""Try each exchange with one row, once a missing or forbidden one has closed the channel that all rows share.

The broker closes a channel over each message for such an exchange, and what else is in flight on it goes out again. A
writer may name another exchange in each row. So after the first such close, one row tries each exchange on a channel
of its own (probe.py). The other rows for that exchange wait meanwhile. Rows for exchanges that work go on.
"""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import assert_never

from relay.engine.row import Key, Outcome, Row, Settled
from relay.engine.send.frames import Encoder
from relay.engine.send.message import ENCODING_ERRORS
from relay.engine.send.probe import LOST, Prober
from relay.engine.send.routes import Address, Router
from relay.engine.send.wire import Barred, Sending, Settle, barred_part

QUIET_AFTER = 30.0  # seconds without a missing or forbidden exchange, after which rows are sent untried again

Subject = bytes | Address  # what one row tries for others: an exchange, or an address where topics are refused


class ExchangeChecks:
    """The rows of one connection that wait until it is known whether their exchange works.

    Rows of one key leave in the order in which they came.

    Args:
        settle: takes the outcomes of rows that do not get to the wire.
    Attributes:
        waiting: rows that try an exchange or wait.
    """

    def __init__(self, router: Router, prober: Prober, settle: Settle) -> None:
        self._router = router
        self._prober = prober
        self._settle = settle
        self._clock = asyncio.get_running_loop().time
        self._wire: Sending | None = None
        self._encoder: Encoder | None = None
        self._barred_at: float | None = None  # None: no exchange has to be tried
        self._working: set[Subject] = set()
        self._by_topic: set[bytes] = set()  # exchanges of which the broker has refused a topic
        self._tried: dict[Subject, list[Row]] = {}  # -> the rows that wait for the one that tries it, in order
        self._keys: dict[Key, Subject] = {}  # of the rows that try or wait
        self._on_wire: dict[Key, int] = {}  # rows of the key on the wire
        self._behind: dict[Key, list[Row]] = {}  # rows that may try an exchange only after those: by another channel
        self._unsent: list[Row] = []  # their exchange works, but there was no channel
        self._redelivered: set[int] = set()
        self.waiting = 0

    def open(self, wire: Sending, encoder: Encoder) -> Sending:
        """Return what sends rows while this wire's channel is open: the wire itself, while every exchange works."""
        self._wire, self._encoder = wire, encoder
        if unsent := self._unsent:
            self._unsent = []
            self.waiting -= len(unsent)
            wire.send(unsent, self._redelivered)
        return wire if self._barred_at is None else self

    def shut(self) -> None:
        """Use the wire no more. Settle what waits for its rows first: those come back before it."""
        self._wire = None
        self._on_wire.clear()
        self._give_back([row for rows in self._behind.values() for row in rows])
        self._behind.clear()

    def note(self, settled: Settled) -> None:
        """Let go what waits for rows that the wire has settled."""
        if not self._on_wire:
            return
        released: list[Row] = []
        for key in [row.key for row in settled.rows]:
            if key is None or key not in self._on_wire:
                continue
            self._on_wire[key] -= 1
            if not self._on_wire[key]:
                del self._on_wire[key]
                released += self._behind.pop(key, ())
        self.waiting -= len(released)
        self.send(released, self._redelivered)

    def learn(self, settled: Settled) -> None:
        """Learn which exchange does not work from rows that were in flight when the channel was closed."""
        if settled.outcome is Outcome.BARRED and (part := barred_part(settled.reason)) is not None:
            self._bar(self._router.address(settled.rows[0]).exchange, part)

    def end_if_quiet(self) -> bool:
        """Whether rows may be sent untried again, which is told once."""
        is_quiet = self._barred_at is not None and self._clock() - self._barred_at >= QUIET_AFTER
        if not is_quiet or self.waiting:
            return False
        self._barred_at = None
        return True

    def send(self, rows: Iterable[Row], redelivered: set[int]) -> None:
        """Send rows whose exchange works, and let the others wait; see `Wire.send`."""
        self._redelivered = redelivered
        free: list[Row] = []
        for row in rows:
            subject, key = self._subject(row), row.key
            ahead = self._keys.get(key) if key is not None else None
            if key is not None and key in self._behind:
                self.waiting += 1
                self._behind[key].append(row)
                continue
            if ahead is None and (subject in self._working or not self._can_try(row)):
                free.append(row)
                if key is not None:
                    self._on_wire[key] = self._on_wire.get(key, 0) + 1
                continue
            self.waiting += 1
            if key is not None and key in self._on_wire:
                self._behind[key] = [row]
                continue
            if key is not None and ahead is None:
                self._keys[key] = subject
            if (waiting := self._tried.get(subject if ahead is None else ahead)) is not None:
                waiting.append(row)
            else:
                self._tried[subject] = []
                # Writers may name thousands. Those that the settings name are few, and other rows' own.
                at_once = row.exchange is None and isinstance(subject, bytes)
                settle = partial(self._end, subject)
                self._prober.send(row, redelivered=row.id in redelivered, settle=settle, at_once=at_once)
        if free and self._wire is not None:
            self._wire.send(free, redelivered)
        elif free:
            self.waiting += len(free)
            self._unsent += free

    def close(self) -> None:
        """Let no row wait any more: the connection has ended. The prober settles the rows that try an exchange."""
        rows = [*self._unsent, *(row for waiting in self._tried.values() for row in waiting)]
        self._unsent = []
        self._tried = {subject: [] for subject in self._tried}
        self._give_back(rows)

    def _give_back(self, rows: list[Row]) -> None:
        self.waiting -= len(rows)
        if rows:
            self._settle(Settled(rows, Outcome.UNKNOWN, LOST))

    def _can_try(self, row: Row) -> bool:
        """Whether a message can be made of the row: the wire refuses it otherwise, and it would try nothing."""
        if self._encoder is None:
            return True
        try:
            self._encoder.encode(row, [], redelivered=False)
        except ENCODING_ERRORS:
            return False
        return True

    def _subject(self, row: Row) -> Subject:
        address = self._router.address(row)
        return address if address.exchange in self._by_topic else address.exchange

    def _end(self, subject: Subject, settled: Settled) -> None:
        """Act on what became of the row that tried this."""
        (row,) = settled.rows
        waiting = self._tried.pop(subject)
        self.waiting -= 1 + len(waiting)
        for each in (row, *waiting):
            if each.key is not None:
                self._keys.pop(each.key, None)
        alike: list[Row] = []  # rows of which the same is true
        match settled.outcome:
            case Outcome.CONFIRMED | Outcome.RETURNED | Outcome.NACKED:
                self._working.add(subject)
            case Outcome.BARRED:
                address, part = self._router.address(row), barred_part(settled.reason)
                if part is None:  # no confirm in time: the exchange has taken it
                    self._working.add(subject)
                else:
                    self._bar(address.exchange, part)
                    alike = [each for each in waiting if part.has_same(address, self._router.address(each))]
            case Outcome.UNKNOWN:  # the connection is lost, or to be used no more
                alike = waiting
            case Outcome.UNSENDABLE | Outcome.REFUSED | Outcome.REJECTED | Outcome.SUSPECT:
                pass  # on its own account: the next one tries
            case _:
                assert_never(settled.outcome)
        ids = {each.id for each in alike}
        # Before the outcome is known: rows that it lets go may have the keys of these.
        self.send([each for each in waiting if each.id not in ids], self._redelivered)
        self._settle(settled._replace(rows=(row, *alike)))

    def _bar(self, exchange: bytes, part: Barred) -> None:
        self._barred_at = self._clock()
        self._working.discard(exchange)
        if part is Barred.TOPIC:
            self._by_topic.add(exchange)
