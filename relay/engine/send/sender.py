"""Send the rows that may go, and decide what follows from each outcome.

With one row of a key at a time, the sender sends no row of a key before the row ahead of it is settled. The broker
refuses rows while a quorum queue elects its leader; no later row of the key can then overtake the refused one. Rows of
other keys fill the window meanwhile.
Otherwise the sender sends rows as they come, and sends a refused row again later.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from time import monotonic
from typing import NamedTuple, assert_never

from relay.config.settings import Unroutable
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.gate import REMEMBERED, KeysUnderWay, Unmarked
from relay.engine.row import Blame, Fault, Key, Outcome, Row, Settled
from relay.engine.send.backpressure import Backpressure
from relay.engine.send.exchange_checks import Checked, ExchangeChecks
from relay.engine.send.probe import Prober
from relay.engine.send.repeats import Repeats
from relay.engine.send.resend_timer import ResendTimer
from relay.engine.send.routes import Router
from relay.engine.send.wire import Suspects, Wire, names_address
from relay.engine.snapshot import CONFIRM_BOUNDS
from relay.observe.histogram import Histogram
from relay.runtime.backoff import backoff

REFILL = 4  # while rows wait, a batch fills at least a quarter of the room: each batch costs the broker the same
LIVE_PART = 3  # a backlog gets a third of max_in_flight while rows of other lanes come: those wait for all in flight
NACK_BACKOFF, NACK_BACKOFF_MAX = 0.05, 2.0  # seconds; a leader election takes half a second
LIVE_FOR = 1.0  # seconds after the last row that came while another lane had a backlog


class Sender:
    """The rows between the table and the broker: the tail offers them, and the marker takes the settled ones.

    Args:
        max_in_flight: messages that may wait for their confirms.
        unroutable: what becomes of a row for which no queue is bound.
    Attributes:
        queue: the rows that wait to be sent.
        in_flight: messages handed to a wire or to the prober and not yet settled.
        failures: attempts since the start that ended without a confirm, by outcome.
        unroutable: rows for which no queue was bound, each time that one was sent, by what became of them.
        confirm_times: see `snapshot.NodeSnapshot`; the wire records them.
        confirmed, faulty: settled rows, which the marker takes (`take_settled`).
        settled: set when there are settled rows.
    """

    def __init__(
        self,
        policy: DeliveryPolicy,
        max_in_flight: int,
        unroutable: Callable[[Row], Unroutable] = lambda _: Unroutable.QUARANTINE,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._unroutable = unroutable
        self._may_send: Callable[[], bool] = lambda: True
        self._wire: Wire | None = None
        self._prober: Prober | None = None
        self._probing: set[int] = set()  # ids of the rows in flight that the prober has sent
        self._redelivered: set[int] = set()
        self._repeats = Repeats()
        self._taken: list[Row] = []  # confirmed, and being marked
        self._unmarked = Unmarked()
        self._stopped = False
        self.queue = SendQueue(policy, max_in_flight, self.pump, self._refuse)
        self.in_flight = 0
        self.failures: dict[Outcome, int] = {outcome: 0 for outcome in Outcome if outcome is not Outcome.CONFIRMED}
        self.unroutable: dict[Unroutable, int] = dict.fromkeys(Unroutable, 0)
        self.confirm_times = Histogram(CONFIRM_BOUNDS)
        self.confirmed: list[Row] = []
        self.faulty: list[Fault] = []
        self.settled = asyncio.Event()

    @property
    def waiting(self) -> int:
        """The number of rows that are not marked yet, nacked rows included; probes are not counted."""
        sent = self.in_flight - len(self._probing)
        return len(self.queue) + sent + len(self.confirmed) + len(self._taken)

    def offer(self, rows: Iterable[Row], *, behind: Collection[int] | None = None) -> None:
        """Take over rows, and send as many as there is room for; see `SendQueue.offer`."""
        if self._unmarked:
            confirmed, rows = self._unmarked.part(rows)
            self.confirmed += confirmed
            if confirmed:
                self.settled.set()
        self.queue.offer(rows, behind)
        self.pump()

    def send_while(self, may_send: Callable[[], bool]) -> None:
        """Send only while `may_send` returns true, for example while this node holds the lanes; by default always."""
        self._may_send = may_send

    def attach(self, wire: Wire | None) -> None:
        """Send through this wire from now on; None while there is no connection."""
        self._wire = wire
        if wire is None:
            self.queue.take_back()
        self.pump()

    def attach_prober(self, prober: Prober | None) -> None:
        """Use this prober for rows that go out alone, and for questions; None while there is no connection."""
        self._prober = prober
        self.queue.checks.forget_answers()

    def settle(self, settled: Settled) -> None:
        """Act on an outcome. The wire calls this."""
        self.in_flight -= len(settled.rows)
        settled = self.queue.suspects.judge(settled)
        if settled.outcome is not Outcome.CONFIRMED:
            self.failures[settled.outcome] += len(settled.rows)
        if self.queue.backpressure.lines and settled.outcome is not Outcome.NACKED:
            self.queue.backpressure.note(settled)
        match settled.outcome:
            case Outcome.CONFIRMED:
                self._take_confirmed(settled.rows)
            case Outcome.RETURNED:
                self._take_returned(settled)
            case Outcome.BARRED:
                self._blame(settled, Blame.ADDRESS)
                self._redelivered.update(row.id for row in settled.rows)  # an earlier send may have arrived
                self._learn(settled)
            case Outcome.REFUSED:
                self._blame(settled, Blame.ROW)
            case Outcome.REJECTED | Outcome.UNSENDABLE:
                self._blame(settled, Blame.ROW_FOR_GOOD)
            case Outcome.NACKED:
                self._take_nacked(settled.rows)
            case Outcome.UNKNOWN | Outcome.SUSPECT:
                # The broker may have taken them: a header tells the consumer that they may be repeats.
                self._redelivered.update(row.id for row in settled.rows)
                self.queue.put_first(settled.rows)
            case _:
                assert_never(settled.outcome)
        if self._probing:
            self._probing.difference_update(row.id for row in settled.rows)
        if self._stopped:
            self.settled.set()
        self.pump()

    def _take_confirmed(self, rows: Sequence[Row]) -> None:
        self.confirmed.extend(rows)
        self.settled.set()
        self.queue.confirm(rows)
        if self._repeats and self._prober is not None:
            self._repeats.note_confirmed(rows, self._prober.router)
        if self._redelivered:
            self._redelivered.difference_update(row.id for row in rows)

    def _take_nacked(self, rows: Sequence[Row]) -> None:
        if self._prober is None:
            self.queue.put_later(rows)
        else:
            self.queue.put_in_line(rows, self._prober.router)

    def _take_returned(self, returned: Settled) -> None:
        (row,) = returned.rows
        unroutable = self._unroutable(row)
        if unroutable is Unroutable.QUARANTINE and self._steps_aside(row):
            self.queue.put_later(returned.rows)
            return
        self.unroutable[unroutable] += 1
        match unroutable:
            case Unroutable.QUARANTINE:
                self._blame(returned, Blame.ADDRESS)
            case Unroutable.SENT:
                self._take_confirmed(returned.rows)
            case Unroutable.DISCARD:
                self._blame(returned, Blame.NOBODY)
            case _:
                assert_never(unroutable)

    def _steps_aside(self, row: Row) -> bool:
        """Whether a returned row is a repeat, and its route may work; see `Repeats`."""
        if self._prober is None or row.id in self._probing:
            return False
        address = self._prober.router.address(row)
        return self._repeats.steps_aside(row, address, is_repeat=row.id in self._redelivered)

    def _learn(self, barred: Settled) -> None:
        """Begin to ask for exchanges if an exchange has closed the channel that all rows share."""
        row = barred.rows[0]
        if self._prober is not None and row.id not in self._probing and names_address(barred.reason):
            self.queue.checks.begin(self._prober.router.address(row), barred.reason)

    def _refuse(self, rows: Sequence[Row], reason: str) -> None:
        self._blame(Settled(rows, Outcome.BARRED, reason), Blame.ADDRESS)

    def _blame(self, settled: Settled, blame: Blame) -> None:
        self.faulty.extend(Fault(row, settled.reason, blame) for row in settled.rows)
        self.settled.set()

    def take_settled(self) -> tuple[list[Row], list[Fault]]:
        """Return what has settled since the last call. The caller has written the earlier rows to the table.

        A faulty row's key stays under way until `queue.put_off`, `release_key` or `remove_followers`.
        """
        self.settled.clear()
        self._taken, faulty = self.confirmed, self.faulty
        self.confirmed, self.faulty = [], []
        return self._taken, faulty

    def give_back(self, lanes: Collection[int]) -> list[Row]:
        """Remove the rows of these lanes and return them; rows in flight and settled rows stay."""

        def is_leaving(row: Row) -> bool:
            return row.lane in lanes

        heads, waiting = self.queue.withdraw(is_leaving)
        for row in heads:
            waiting += self.queue.remove_followers(row)
        rows = [*heads, *waiting]
        self._redelivered.difference_update(row.id for row in rows)
        return rows

    async def wait_settled(self) -> bool:
        """Wait for settled rows; False when the sender has stopped and no row is in flight.

        The caller has written the rows that it took before to the table.
        """
        self._taken = []
        while not (self.confirmed or self.faulty):
            if self._stopped and not self.in_flight:
                return False
            self.settled.clear()
            await self.settled.wait()
        return True

    def wake(self) -> None:
        """Wake the task that waits for `settled`, as it has other work."""
        self.settled.set()

    def stop(self) -> None:
        """Send no more rows. Rows in flight still settle; the others stay pending in the table."""
        self._stopped = True
        self.queue.drop_unsent()
        self.settled.set()

    async def abandon(self) -> None:
        """Forget every row, as the session that held their lanes is lost. Return when no row is in flight.

        The sender remembers which rows the broker confirmed. When it gets them again, it does not send them again.
        """
        self.stop()
        if self._prober is not None:
            self._prober.give_up()
        while self.in_flight:
            self.settled.clear()
            await self.settled.wait()
        self._unmarked.remember((*self._taken, *self.confirmed))
        self.take_settled()
        self.queue.clear()
        self._stopped = False

    def pump(self) -> None:
        """Send as many rows as there is room for. Call it when `may_send` may have become true."""
        wire, queue = self._wire, self.queue
        waiting = len(queue.ready) + len(queue.backpressure.due)
        if wire is None or not waiting or self._stopped or not self._may_send():
            return
        if queue.alone and self._prober is not None:
            self._probe(self._prober)
        limit = 1 if queue.suspects else self._max_in_flight
        if monotonic() < queue.live_until:
            limit = max(1, limit // LIVE_PART)
        ready = queue.ready
        room = limit - self.in_flight + len(self._probing)
        if room > 0 and room >= min(waiting, limit // REFILL):
            if (queue.checks.is_on or queue.backpressure.lines) and self._prober is not None:
                rows = queue.take_checked(room, self._prober)
            else:
                rows = [ready.popleft() for _ in range(min(room, len(ready)))]
            if rows:
                self.in_flight += len(rows)
                wire.send(rows, self._redelivered)

    def _probe(self, prober: Prober) -> None:
        for row in self.queue.take_alone():
            self._probing.add(row.id)
            self.in_flight += 1
            prober.send(row, redelivered=row.id in self._redelivered)


class Withdrawn(NamedTuple):
    """Rows that were taken out of the queue."""

    heads: list[Row]  # the next rows of their keys; the keys stay under way, as keys of faulty rows do
    waiting: list[Row]  # rows that waited behind another row of their key


class SendQueue:
    """The rows that were offered and are not in flight.

    Args:
        max_in_flight: see `Sender`.
        on_ready: called when rows have become ready by a timer, by the broker's answer or by `release_key`.
        on_refused: gets rows whose address the broker refuses, and the broker's words; the rows were not sent.
    Attributes:
        ready: the rows that may go now, in order; the sender takes them from the left.
        keys: the keys of which a row is under way; the other rows of theirs wait.
        checks, backpressure: while checks are on or lines exist, the sender takes rows by `take_checked`.
        alone: ids of rows that go out alone on a channel.
        suspects: rows that go one at a time.
        live_until: until this moment (monotonic) a backlog gets a part of the room (`LIVE_PART`).
    """

    def __init__(
        self,
        policy: DeliveryPolicy,
        max_in_flight: int,
        on_ready: Callable[[], None],
        on_refused: Callable[[Sequence[Row], str], None],
    ) -> None:
        self._policy = policy
        self._by_key = policy.one_at_a_time
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._resends = ResendTimer(self._due)
        self._nacks: dict[int, int] = {}  # id -> times
        # Ids of rows that were refused and then put away, the oldest first. They may be repeats, so new rows pass them.
        self._nacked: dict[int, None] = {}
        self.keys = KeysUnderWay(policy)
        self.checks = ExchangeChecks(self._checked)
        self.backpressure = Backpressure(max_in_flight, by_key=self._by_key, on_due=on_ready)
        self.alone: set[int] = set()
        self.ready: deque[Row] = deque()
        self.suspects = Suspects()
        self.live_until = 0.0

    def __len__(self) -> int:
        """Return how many rows may go now, after a wait or after a check, without rows behind a row of their key."""
        return len(self.ready) + len(self._resends) + len(self.checks) + len(self.backpressure)

    def offer(self, rows: Iterable[Row], behind: Collection[int] | None) -> None:
        """Take over rows; the rows of one lane must come in id order.

        Args:
            behind: lanes whose rows are from a backlog. By key, those of other lanes go first, or thousands would delay
                them. None: there is no backlog.
        """
        if behind is not None and self._by_key:
            rows = list(rows)
            if live := [row for row in rows if row.lane not in behind]:
                self.live_until = monotonic() + LIVE_FOR
                self.ready.extendleft(reversed(self.keys.heads(live)))
            rows = [row for row in rows if row.lane in behind]
        self.ready.extend(self.keys.heads(rows))

    def send_alone(self, id_: int) -> None:
        """Send the row of this id alone on a channel; the caller offers the row next."""
        self.alone.add(id_)

    def take_alone(self) -> list[Row]:
        """Take the ready rows that go out alone on a channel."""
        found = [row for row in self.ready if row.id in self.alone]
        for row in found:
            self.ready.remove(row)
            self.alone.remove(row.id)
        return found

    def take_checked(self, room: int, prober: Prober) -> list[Row]:
        """Return up to `room` ready rows that may go.

        Rows of unknown exchanges wait for an answer, and rows of addresses that refuse wait in line.
        """
        self.checks.end_if_quiet()
        taken = self.backpressure.take(room)
        while self.ready and len(taken) < room:
            row = self.ready.popleft()
            if self.checks.is_on and not self.checks.lets_go(row, prober):
                continue
            address = prober.router.address(row)
            was_refused = row.id in self._nacks or row.id in self._nacked
            if self.backpressure.lets_go(row, address, was_refused=was_refused):
                taken.append(row)
        return taken

    def take_back(self) -> None:
        """Make the rows that wait for an answer or in line ready again, as earlier rows in flight may come back."""
        self.put_first(self.checks.take_back())
        self.put_first(self.backpressure.take_back())

    def _checked(self, checked: Checked) -> None:
        free, behind = checked.free, checked.behind
        if self._by_key or not self._policy.put_away_holds_key:
            free += chain.from_iterable(behind.values())
        elif behind:
            self._keep_behind(behind)
        self.put_first(free)
        if checked.refused:
            self._on_refused(self._withdrawn(checked.refused), checked.reason)
        self._on_ready()

    def _keep_behind(self, behind: dict[Key, list[Row]]) -> None:
        """Let the rows of these keys wait (pipelined), as a row of each key was refused before it was sent."""
        for row in self.ready:
            if row.key in behind:
                behind[row.key].append(row)
        self.ready = deque(row for row in self.ready if row.key not in behind)
        self.keys.add_behind(behind)

    def put_first(self, rows: Sequence[Row]) -> None:
        """Send these rows before all others."""
        self.ready.extendleft(reversed(rows))

    def put_in_line(self, rows: Iterable[Row], router: Router) -> None:
        """Send these rows, which the broker refused for now, as soon as it takes rows for their address again."""
        for row in rows:
            times = self._nacks.get(row.id, 0)
            if self.backpressure.refuse(row, router.address(row), again=times > 0):
                self._nacks[row.id] = times + 1
            else:
                self.put_later((row,))

    def put_later(self, rows: Iterable[Row]) -> None:
        """Send these rows, which the broker refused for now, after a wait that grows with each refusal."""
        for row in rows:
            times = self._nacks[row.id] = self._nacks.get(row.id, 0) + 1
            self._resends.push(backoff(times, NACK_BACKOFF, NACK_BACKOFF_MAX), row)

    def confirm(self, rows: Iterable[Row]) -> None:
        """Make the next row of each of their keys ready."""
        self.keys.confirm(rows, self.ready)
        if self._nacks or self._nacked:
            for row in rows:
                self._nacks.pop(row.id, None)
                self._nacked.pop(row.id, None)

    def put_off(self, row: Row) -> list[Row]:
        """Put off a faulty row: return the rows that wait behind it, or let its key go on and return no rows."""
        if self._policy.backoff_holds_key:
            return self.remove_followers(row)
        self.release_key(row)
        return []

    def release_key(self, row: Row) -> None:
        """Let the key of a faulty row go on without it."""
        if (following := self.keys.release_key(row)) is not None:
            self.ready.append(following)
        self._on_ready()

    def remove_followers(self, row: Row) -> list[Row]:
        """Remove and return the rows behind a faulty row, in order; its key is not under way any more."""
        return self._withdrawn(self.keys.remove_followers(row))

    def withdraw(self, matches: Callable[[Row], bool]) -> Withdrawn:
        """Remove and return the rows that match, with the rows behind them if a row that is put away holds its key."""
        self.take_back()
        heads = [row for row in self.ready if matches(row)]
        if heads:
            self.ready = deque(row for row in self.ready if not matches(row))
        heads += self._resends.withdraw(matches)
        return Withdrawn(self._withdrawn(heads), self._withdrawn(self.keys.withdraw(matches)))

    def _withdrawn(self, rows: list[Row]) -> list[Row]:
        ids = {row.id for row in rows}
        self.suspects.forget(ids)
        self.alone -= ids
        for id_ in ids & self._nacks.keys():
            del self._nacks[id_]
            if self._by_key:  # otherwise a row might pass an earlier one of its key
                self._nacked[id_] = None
        while len(self._nacked) > REMEMBERED:
            del self._nacked[next(iter(self._nacked))]
        return rows

    def drop_unsent(self) -> None:
        """Forget the rows that might go now or later."""
        self.checks.take_back()
        self.backpressure.clear()
        self.ready.clear()
        self._resends.clear()
        self.alone.clear()

    def clear(self) -> None:
        """Forget every row and key."""
        self.drop_unsent()
        self.keys.clear()
        self.suspects.clear()
        self._nacks.clear()
        self._nacked.clear()

    def _due(self, rows: list[Row]) -> None:
        self.ready.extend(rows)
        self._on_ready()
