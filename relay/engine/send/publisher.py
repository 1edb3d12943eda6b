"""Decide which row goes to the broker next, and what follows from each outcome.

With `ordering = "key"` nothing of a key is sent before its predecessor is settled: a refusal, which is normal while
a quorum queue elects its leader, then cannot let a later row overtake. Other keys fill the window meanwhile.
With `pipelined` and `none` rows go out as they come, and a refused one comes back later.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import assert_never

from relay.backoff import backoff
from relay.config.settings import KeyPolicy, Ordering, RelaySettings
from relay.engine.row import Fault, Outcome, Row, Settled, key_of
from relay.engine.send.in_flight_keys import InFlightKeys
from relay.engine.send.probe import Prober
from relay.engine.send.resend_timer import ResendTimer
from relay.engine.send.wire import Sending
from relay.engine.snapshot import CONFIRM_BOUNDS, DELIVERY_BOUNDS
from relay.observe.histogram import Histogram

REMEMBERED = 50_000  # rows; a window has far fewer
NACK_BACKOFF, NACK_BACKOFF_MAX = 0.05, 2.0  # seconds; a leader election takes half a second
REFILL = 4  # this part of the room is filled at once while rows wait: the broker's costs are for each batch
LIVE_PART = 3  # this part of max_in_flight is a backlog's share while others' rows come: they wait for all of it
LIVE_FOR = 1.0  # seconds after the last of them


class Unmarked:
    """Remembers them: read again, they are marked without being sent again."""

    def __init__(self) -> None:
        self._message_ids: dict[int, bytes] = {}  # by id

    def __bool__(self) -> bool:
        return bool(self._message_ids)

    def remember(self, rows: Iterable[Row]) -> None:
        """Beside those of earlier sessions that ended before they were all read again."""
        self._message_ids |= {row.id: row.message_id for row in rows}
        for id_ in list(self._message_ids)[:-REMEMBERED]:  # some had been marked, and nobody asks for them any more
            del self._message_ids[id_]

    def part(self, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Give those of the rows that are remembered, which are not any more then, and the others."""
        confirmed: list[Row] = []
        others: list[Row] = []
        for row in rows:
            known = self._message_ids.pop(row.id, None) == row.message_id
            (confirmed if known else others).append(row)
        return confirmed, others


class Suspects:
    """Rows that were in flight when it closed. They go out one at a time: who closes it again, alone, is to blame.

    True while there are some.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ids)

    def judge(self, settled: Settled) -> Settled:
        """Give the outcome: a suspect's that was alone, and closed the channel again, is that it was refused."""
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


class Publisher:
    """The rows between the table and the broker: offered by the tail, taken over by the marker when settled.

    Attributes:
        in_flight: messages handed to a wire or to the prober and not yet settled.
        leaving: lanes of which no more rows are taken over (`give_back`).
        may_send: whether the lanes are still ours, as far as we know.
        prober: sends what is to go out alone; None while there is no connection.
        published_total: rows confirmed and marked since the start; the marker counts them.
        reported: of these, how many the node's row in the table tells.
        failures: attempts since the start that ended without a confirm, by outcome.
        confirm_times, delivery_times: see `snapshot.NodeSnapshot`; the wire and the marker observe them.
        confirmed, faulty: settled rows, for the marker to take (`take_settled`).
        settled: set when there are some.
    """

    def __init__(self, settings: RelaySettings) -> None:
        self._by_key = settings.ordering is Ordering.KEY
        self._holding = settings.key_policy is KeyPolicy.HOLD
        self._max_in_flight = settings.max_in_flight
        self._wire: Sending | None = None
        self._ready: deque[Row] = deque()
        self._in_flight_keys = InFlightKeys()
        self._resends = ResendTimer(self._due)
        self._live_until = 0.0  # rows came beside a backlog
        self._nacks: dict[int, int] = {}  # id -> times
        self._redelivered: set[int] = set()
        self._taken: list[Row] = []  # confirmed, and being marked
        self._unmarked = Unmarked()
        self._turned_away: list[Row] = []  # of lanes that are leaving
        self._stopped = False
        self._suspects = Suspects()
        self._alone: set[int] = set()  # to be sent by the prober
        self._probing: set[int] = set()  # sent by it
        self.in_flight = 0
        self.leaving: set[int] = set()
        self.may_send: Callable[[], bool] = lambda: True
        self.prober: Prober | None = None
        self.published_total = self.reported = 0
        self.failures: dict[Outcome, int] = {outcome: 0 for outcome in Outcome if outcome is not Outcome.CONFIRMED}
        self.confirm_times, self.delivery_times = Histogram(CONFIRM_BOUNDS), Histogram(DELIVERY_BOUNDS)
        self.confirmed: list[Row] = []
        self.faulty: list[Fault] = []
        self.settled = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Rows to go or under way up to their mark, nacked ones too; no probe."""
        sent = self.in_flight - len(self._probing)
        return len(self._ready) + sent + len(self.confirmed) + len(self._taken) + len(self._resends)

    def offer(self, rows: Iterable[Row], *, behind: Collection[int] = ()) -> None:
        """Take rows over; those of one lane must come in id order.

        Args:
            behind: lanes with a backlog. By key, rows of the others go before theirs: they would wait for thousands.
        """
        if self._unmarked or self.leaving:
            rows = self._to_send(rows)
        if behind and self._by_key:
            rows = list(rows)
            if live := [row for row in rows if row.lane not in behind]:
                self._live_until = monotonic() + LIVE_FOR
                self._ready.extendleft(reversed(self._heads(live)))
            rows = [row for row in rows if row.lane in behind]
        self._ready.extend(self._heads(rows))
        self.pump()

    def _heads(self, rows: Iterable[Row]) -> Sequence[Row]:
        return self._in_flight_keys.take(rows) if self._by_key else list(rows)

    def send_alone(self, id_: int) -> None:
        """Let the row of this id, which is offered next, go out on a channel of its own."""
        self._alone.add(id_)

    def attach(self, wire: Sending | None) -> None:
        """Send through this wire from now on; None while there is no connection."""
        self._wire = wire
        self.pump()

    def settle(self, settled: Settled) -> None:
        """Act on an outcome. The wire calls this."""
        self.in_flight -= len(settled.rows)
        if self._probing:
            self._probing.difference_update(row.id for row in settled.rows)
        settled = self._suspects.judge(settled)
        if settled.outcome is not Outcome.CONFIRMED:
            self.failures[settled.outcome] += len(settled.rows)
        match settled.outcome:
            case Outcome.CONFIRMED:
                self._confirm(settled.rows)
            case Outcome.RETURNED | Outcome.BARRED | Outcome.REFUSED | Outcome.REJECTED | Outcome.UNSENDABLE:
                self.faulty.extend(Fault(row, settled.reason, settled.outcome) for row in settled.rows)
                if settled.outcome is Outcome.BARRED:  # an earlier one of them may have arrived
                    self._redelivered.update(row.id for row in settled.rows)
                self.settled.set()
            case Outcome.NACKED:
                for row in settled.rows:
                    times = self._nacks[row.id] = self._nacks.get(row.id, 0) + 1
                    self._resends.push(backoff(times, NACK_BACKOFF, NACK_BACKOFF_MAX), row)
            case Outcome.UNKNOWN | Outcome.SUSPECT:
                # The broker may have taken them: the consumer is told that they are repeats.
                self._redelivered.update(row.id for row in settled.rows)
                self._ready.extendleft(reversed(settled.rows))
            case _:
                assert_never(settled.outcome)
        if self._stopped:
            self.settled.set()
        self.pump()

    def take_settled(self) -> tuple[list[Row], list[Fault]]:
        """Give what is settled since the last call, which says that everything given before is in the table.

        A faulty row's key stays held until `put_off`, `release_key` or `remove_followers`.
        """
        self.settled.clear()
        self._taken, faulty = self.confirmed, self.faulty
        self.confirmed, self.faulty = [], []
        return self._taken, faulty

    def put_off(self, row: Row) -> list[Row]:
        """A faulty row comes again later: give the rows behind it, which come with it; under `skip` its key goes on."""
        if self._holding:
            return self.remove_followers(row)
        self.release_key(row)
        return []

    def release_key(self, row: Row) -> None:
        """A faulty row was put away and its key goes on without it."""
        key = row.key if self._by_key else None
        if key is not None and (follower := self._in_flight_keys.next_of(key)) is not None:
            self._ready.append(follower)
        self.pump()

    def remove_followers(self, row: Row) -> list[Row]:
        """A faulty row was put away and its key waits: give the rows that were offered behind it, in order."""
        key = row.key
        return self._given_back(self._in_flight_keys.pop(key, None) or ()) if key is not None else []

    def withdraw(self, matches: Callable[[Row], bool]) -> list[Row]:
        """Give back the rows that match and were to be sent next; their keys stay held as those of faulty rows."""
        found = [row for row in self._ready if matches(row)]
        self._ready = deque(row for row in self._ready if not matches(row))
        found += self._resends.withdraw(matches)
        return self._given_back(found)

    def withdraw_waiting(self, matches: Callable[[Row], bool], *, with_followers: bool) -> list[Row]:
        """Give back the rows that match and whose key another row holds, and those behind them if wanted."""
        return self._given_back(self._in_flight_keys.withdraw(matches, with_followers=with_followers))

    def give_back(self, lanes: Collection[int]) -> list[Row]:
        """Give back the rows of lanes that leave, but for those that are in flight or settled."""

        def is_leaving(row: Row) -> bool:
            return row.lane in lanes

        heads = self.withdraw(is_leaving)
        rows = [*heads, *self.withdraw_waiting(is_leaving, with_followers=True), *self._turned_away]
        self._turned_away.clear()
        if self._by_key:
            for row in heads:
                self._in_flight_keys.pop(key_of(row), None)
        for row in rows:
            self._nacks.pop(row.id, None)
            self._redelivered.discard(row.id)
        return rows

    def _given_back(self, rows: Iterable[Row]) -> list[Row]:
        rows = list(rows)
        ids = {row.id for row in rows}
        self._suspects.forget(ids)
        self._alone -= ids
        return rows

    async def wait_settled(self) -> bool:
        """Wait for settled rows, those taken before being in the table; False when stopped and none is to come."""
        self._taken = []
        while not (self.confirmed or self.faulty):
            if self._stopped and not self.in_flight:
                return False
            self.settled.clear()
            await self.settled.wait()
        return True

    def stop(self) -> None:
        """Send no more. What is in flight is still settled; the rest stays pending in the table."""
        self._stopped = True
        self._forget_unsent()
        self.settled.set()

    async def abandon(self) -> None:
        """Forget every row: the session that held their lanes is lost. Returns when nothing is in flight any more.

        What the broker confirmed is remembered: read again, it is marked without being sent again.
        """
        self.stop()
        if self.prober is not None:
            self.prober.give_up()
        while self.in_flight:
            self.settled.clear()
            await self.settled.wait()
        self._unmarked.remember((*self._taken, *self.confirmed))
        self.take_settled()
        self._forget_unsent()
        self.leaving.clear()
        self._in_flight_keys.clear()
        self._suspects.clear()
        self._nacks.clear()
        self._stopped = False

    def _to_send(self, rows: Iterable[Row]) -> Iterable[Row]:
        """Take out what is confirmed already, and what is not ours for much longer."""
        if self.leaving:
            rows = list(rows)
            self._turned_away += [row for row in rows if row.lane in self.leaving]
            rows = [row for row in rows if row.lane not in self.leaving]
        if self._unmarked:
            confirmed, rows = self._unmarked.part(rows)
            self.confirmed += confirmed
            if confirmed:
                self.settled.set()
        return rows

    def _forget_unsent(self) -> None:
        self._ready.clear()
        self._resends.clear()
        self._alone.clear()
        self._turned_away.clear()

    def _confirm(self, rows: Iterable[Row]) -> None:
        in_flight_keys, ready = self._in_flight_keys, self._ready
        self.confirmed.extend(rows)
        self.settled.set()
        if self._by_key:
            for key in map(key_of, rows):
                waiting = in_flight_keys.pop(key, None)
                if waiting is not None:
                    # To the front: a long queue behind one key would else finish last, alone.
                    ready.appendleft(waiting.pop(0))
                    in_flight_keys[key] = waiting or None
        if self._nacks or self._redelivered:
            for row in rows:
                self._nacks.pop(row.id, None)
                self._redelivered.discard(row.id)

    def _due(self, rows: list[Row]) -> None:
        self._ready.extend(rows)
        self.pump()

    def pump(self) -> None:
        """Send what there is room for; call it when `may_send` is true again."""
        wire, ready = self._wire, self._ready
        if wire is None or not ready or self._stopped or not self.may_send():
            return
        if self._alone and self.prober is not None:
            self._probe(self.prober)
        limit = 1 if self._suspects else self._max_in_flight
        if monotonic() < self._live_until:
            limit = max(1, limit // LIVE_PART)
        room = min(limit - self.in_flight + len(self._probing) + wire.waiting, len(ready))
        if room > 0 and room >= min(len(ready), limit // REFILL):
            self.in_flight += room
            wire.send([ready.popleft() for _ in range(room)], self._redelivered)

    def _probe(self, prober: Prober) -> None:
        for row in [row for row in self._ready if row.id in self._alone]:
            self._ready.remove(row)
            self._alone.remove(row.id)
            self._probing.add(row.id)
            self.in_flight += 1
            prober.send(row, redelivered=row.id in self._redelivered)
