"""The rows that wait to be sent: which may go next, and which wait behind another row of their key.

With one row of a key at a time, nothing of a key is sent before its predecessor is settled: a refusal, which is normal
while a quorum queue elects its leader, then cannot let a later row overtake. Other keys fill the window meanwhile.
Otherwise rows go out as they come, and a refused one comes back later.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import NamedTuple

from relay.backoff import backoff
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.row import Key, Outcome, Row, Settled, key_of
from relay.engine.send.exchange_checks import Checked, ExchangeChecks
from relay.engine.send.probe import Prober
from relay.engine.send.resend_timer import ResendTimer

NACK_BACKOFF, NACK_BACKOFF_MAX = 0.05, 2.0  # seconds; a leader election takes half a second
LIVE_FOR = 1.0  # seconds after the last row that came beside a backlog


class Withdrawn(NamedTuple):
    """Rows that were taken out of the queue."""

    heads: list[Row]  # they were next; their keys stay held as those of faulty rows
    waiting: list[Row]  # another row of their key held them


class Suspects:
    """Rows that were in flight when the broker closed the channel on account of one of them.

    They go out one at a time: the row that closes it again, alone, is to blame. True while there are some.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ids)

    def judge(self, settled: Settled) -> Settled:
        """Return the outcome to act on: a suspect that was alone and closed the channel again was refused."""
        if not self._ids and settled.outcome is not Outcome.SUSPECT:
            return settled
        ids = {row.id for row in settled.rows}
        if settled.outcome is Outcome.SUSPECT:
            if len(settled.rows) != 1 or ids.isdisjoint(self._ids):
                self._ids |= ids
                return settled
            settled = settled._replace(outcome=Outcome.REFUSED)
        self._ids -= ids
        return settled

    def forget(self, ids: Collection[int]) -> None:
        """Suspect these no more."""
        self._ids.difference_update(ids)

    def clear(self) -> None:
        """Suspect none."""
        self._ids.clear()


class SendQueue:
    """The rows that were offered and are not at the broker.

    Args:
        on_ready: called when a row has become ready by a method that says so, by a timer or by the broker's answer.
        on_refused: takes rows that were not sent, as the broker takes no message for their address, and its words.
    Attributes:
        ready: the rows that may go now, in order; the publisher takes them from the left.
        checks: while they are on, the publisher takes rows by `take_checked`.
        alone: ids of rows that go out alone on a channel.
        suspects: rows that go one at a time.
        live_until: until when (monotonic) rows without a backlog have come recently.
    """

    def __init__(
        self, policy: DeliveryPolicy, on_ready: Callable[[], None], on_refused: Callable[[Sequence[Row], str], None]
    ) -> None:
        self._policy = policy
        self._by_key = policy.one_at_a_time
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._in_flight_keys: dict[Key, list[Row] | None] = {}  # a row of it is under way -> the rows behind that one
        self._resends = ResendTimer(self._due)
        self._nacks: dict[int, int] = {}  # id -> times
        self.checks = ExchangeChecks(self._checked)
        self.alone: set[int] = set()
        self.ready: deque[Row] = deque()
        self.suspects = Suspects()
        self.live_until = 0.0

    def __len__(self) -> int:
        """Return how many rows may go now, after a refusal or after a check; not those behind a row of their key."""
        return len(self.ready) + len(self._resends) + len(self.checks)

    def offer(self, rows: Iterable[Row], behind: Collection[int]) -> None:
        """Take rows over; those of one lane must come in id order.

        Args:
            behind: lanes with a backlog. By key, rows of the others go before theirs: they would wait for thousands.
        """
        if behind and self._by_key:
            rows = list(rows)
            if live := [row for row in rows if row.lane not in behind]:
                self.live_until = monotonic() + LIVE_FOR
                self.ready.extendleft(reversed(self._heads(live)))
            rows = [row for row in rows if row.lane in behind]
        self.ready.extend(self._heads(rows))

    def _heads(self, rows: Iterable[Row]) -> Sequence[Row]:
        """Return the rows that may go now; the others wait behind the row of their key that is under way."""
        if not self._by_key:
            return list(rows)
        keys = self._in_flight_keys
        heads: list[Row] = []
        for row in rows:
            if (key := key_of(row))[1] is not None:
                if key in keys:
                    waiting = keys[key]
                    if waiting is None:
                        keys[key] = [row]
                    else:
                        waiting.append(row)
                    continue
                keys[key] = None
            heads.append(row)
        return heads

    def send_alone(self, id_: int) -> None:
        """Send the row of this id, which is offered next, alone on a channel."""
        self.alone.add(id_)

    def take_alone(self) -> list[Row]:
        """Take the ready rows that go out alone on a channel."""
        found = [row for row in self.ready if row.id in self.alone]
        for row in found:
            self.ready.remove(row)
            self.alone.remove(row.id)
        return found

    def take_checked(self, room: int, prober: Prober) -> list[Row]:
        """Take up to `room` ready rows whose exchange works; let others before them wait for the broker's answer."""
        self.checks.end_if_quiet()
        taken: list[Row] = []
        while self.ready and len(taken) < room:
            row = self.ready.popleft()
            if self.checks.lets_go(row, prober):
                taken.append(row)
        return taken

    def take_back_checked(self) -> None:
        """Make the rows that wait for an answer ready again: what is in flight before them may come back."""
        self.ready.extendleft(reversed(self.checks.take_back()))

    def _checked(self, checked: Checked) -> None:
        self.put_first(checked.free)
        if checked.refused:
            self._on_refused(self._withdrawn(checked.refused), checked.reason)
        self._on_ready()

    def put_first(self, rows: Sequence[Row]) -> None:
        """Send these rows before all others."""
        self.ready.extendleft(reversed(rows))

    def put_later(self, rows: Iterable[Row]) -> None:
        """Send these rows again after a wait that grows with each refusal; the broker refused them for now."""
        for row in rows:
            times = self._nacks[row.id] = self._nacks.get(row.id, 0) + 1
            self._resends.push(backoff(times, NACK_BACKOFF, NACK_BACKOFF_MAX), row)

    def confirm(self, rows: Iterable[Row]) -> None:
        """Make the next row of each of their keys ready."""
        if self._by_key:
            keys, ready = self._in_flight_keys, self.ready
            for key in map(key_of, rows):
                waiting = keys.pop(key, None)
                if waiting is not None:
                    # To the front: a long queue behind one key would else finish last, alone.
                    ready.appendleft(waiting.pop(0))
                    keys[key] = waiting or None
        if self._nacks:
            for row in rows:
                self._nacks.pop(row.id, None)

    def put_off(self, row: Row) -> list[Row]:
        """Return the rows behind a faulty row that comes again later; they come with it, or its key goes on."""
        if self._policy.backoff_holds_key:
            return self.remove_followers(row)
        self.release_key(row)
        return []

    def release_key(self, row: Row) -> None:
        """Let the key of a faulty row go on without it."""
        if self._by_key and (key := row.key) is not None and (waiting := self._in_flight_keys.pop(key)) is not None:
            self.ready.append(waiting.pop(0))
            self._in_flight_keys[key] = waiting or None
        self._on_ready()

    def remove_followers(self, row: Row) -> list[Row]:
        """Return the rows that were offered behind a faulty row, in order; its key waits elsewhere from now on."""
        key = row.key
        waiting = self._in_flight_keys.pop(key, None) if key is not None else None
        return self._withdrawn(waiting or [])

    def withdraw(self, matches: Callable[[Row], bool]) -> Withdrawn:
        """Take out the rows that match, and the rows behind these if a row that is put away holds its key."""
        self.take_back_checked()
        heads = [row for row in self.ready if matches(row)]
        if heads:
            self.ready = deque(row for row in self.ready if not matches(row))
        heads += self._resends.withdraw(matches)
        return Withdrawn(self._withdrawn(heads), self._withdrawn(self._withdraw_waiting(matches)))

    def _withdraw_waiting(self, matches: Callable[[Row], bool]) -> list[Row]:
        found: list[Row] = []
        for key, waiting in self._in_flight_keys.items():
            first = next((n for n, row in enumerate(waiting or ()) if matches(row)), None)
            if waiting is None or first is None:
                continue
            if self._policy.put_away_holds_key:
                found += waiting[first:]
                self._in_flight_keys[key] = waiting[:first] or None
            else:
                found += [row for row in waiting if matches(row)]
                self._in_flight_keys[key] = [row for row in waiting if not matches(row)] or None
        return found

    def _withdrawn(self, rows: list[Row]) -> list[Row]:
        ids = {row.id for row in rows}
        self.suspects.forget(ids)
        self.alone -= ids
        if self._nacks:
            for id_ in ids:
                self._nacks.pop(id_, None)
        return rows

    def drop_unsent(self) -> None:
        """Forget the rows that might go now or later."""
        self.checks.take_back()
        self.ready.clear()
        self._resends.clear()
        self.alone.clear()

    def clear(self) -> None:
        """Forget every row and key."""
        self.drop_unsent()
        self._in_flight_keys.clear()
        self.suspects.clear()
        self._nacks.clear()

    def _due(self, rows: list[Row]) -> None:
        self.ready.extend(rows)
        self._on_ready()
