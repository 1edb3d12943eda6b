"""Send the rows that may go, and decide what follows from each outcome."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import assert_never

from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.row import Blame, Fault, Outcome, Row, Settled
from relay.engine.send.probe import Prober
from relay.engine.send.send_queue import SendQueue
from relay.engine.send.wire import Wire, names_address
from relay.engine.snapshot import CONFIRM_BOUNDS
from relay.observe.histogram import Histogram

REMEMBERED = 50_000  # rows; a window has far fewer
REFILL = 4  # this part of the room is filled at once while rows wait: the broker's costs are for each batch
LIVE_PART = 3  # this part of max_in_flight is a backlog's share while others' rows come: they wait for all of it


class Unmarked:
    """Rows that were confirmed, and perhaps not marked: read again, they are marked without being sent again."""

    def __init__(self) -> None:
        self._message_ids: dict[int, bytes] = {}  # by id

    def __bool__(self) -> bool:
        return bool(self._message_ids)

    def remember(self, rows: Iterable[Row]) -> None:
        """Remember these, too; earlier ones may not all have been read again."""
        self._message_ids |= {row.id: row.message_id for row in rows}
        for id_ in list(self._message_ids)[:-REMEMBERED]:  # some had been marked, and are not read again
            del self._message_ids[id_]

    def part(self, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Split the rows into those already confirmed, which are forgotten, and the rest."""
        confirmed: list[Row] = []
        others: list[Row] = []
        for row in rows:
            known = self._message_ids.pop(row.id, None) == row.message_id
            (confirmed if known else others).append(row)
        return confirmed, others


class Publisher:
    """The rows between the table and the broker: offered by the tail, taken over by the marker when settled.

    Args:
        max_in_flight: messages that may wait for their confirms.
        may_send: whether their lanes are still ours, as far as we know.
    Attributes:
        queue: the rows that are to be sent.
        in_flight: messages handed to a wire or to the prober and not yet settled.
        failures: attempts since the start that ended without a confirm, by outcome.
        confirm_times: see `snapshot.NodeSnapshot`; the wire observes them.
        confirmed, faulty: settled rows, for the marker to take (`take_settled`).
        settled: set when there are some.
    """

    def __init__(
        self, policy: DeliveryPolicy, max_in_flight: int, *, may_send: Callable[[], bool] = lambda: True
    ) -> None:
        self._max_in_flight = max_in_flight
        self._may_send = may_send
        self._wire: Wire | None = None
        self._prober: Prober | None = None
        self._probing: set[int] = set()  # sent by it
        self._redelivered: set[int] = set()
        self._taken: list[Row] = []  # confirmed, and being marked
        self._unmarked = Unmarked()
        self._stopped = False
        self.queue = SendQueue(policy, self.pump, self._refuse)
        self.in_flight = 0
        self.failures: dict[Outcome, int] = {outcome: 0 for outcome in Outcome if outcome is not Outcome.CONFIRMED}
        self.confirm_times = Histogram(CONFIRM_BOUNDS)
        self.confirmed: list[Row] = []
        self.faulty: list[Fault] = []
        self.settled = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Rows to go or under way up to their mark, nacked ones too; no probe."""
        sent = self.in_flight - len(self._probing)
        return len(self.queue) + sent + len(self.confirmed) + len(self._taken)

    def offer(self, rows: Iterable[Row], *, behind: Collection[int] = ()) -> None:
        """Take rows over and send what there is room for; see `SendQueue.offer`."""
        if self._unmarked:
            confirmed, rows = self._unmarked.part(rows)
            self.confirmed += confirmed
            if confirmed:
                self.settled.set()
        self.queue.offer(rows, behind)
        self.pump()

    def attach(self, wire: Wire | None) -> None:
        """Send through this wire from now on; None while there is no connection."""
        self._wire = wire
        if wire is None:
            self.queue.take_back_checked()
        self.pump()

    def attach_prober(self, prober: Prober | None) -> None:
        """Send through it what is to go out alone, and ask it for exchanges; None while there is no connection."""
        self._prober = prober
        self.queue.checks.forget_answers()

    def settle(self, settled: Settled) -> None:
        """Act on an outcome. The wire calls this."""
        self.in_flight -= len(settled.rows)
        settled = self.queue.suspects.judge(settled)
        if settled.outcome is not Outcome.CONFIRMED:
            self.failures[settled.outcome] += len(settled.rows)
        match settled.outcome:
            case Outcome.CONFIRMED:
                self.confirmed.extend(settled.rows)
                self.settled.set()
                self.queue.confirm(settled.rows)
                if self._redelivered:
                    self._redelivered.difference_update(row.id for row in settled.rows)
            case Outcome.RETURNED:
                self._blame(settled, Blame.ADDRESS)
            case Outcome.BARRED:
                self._blame(settled, Blame.ADDRESS)
                self._redelivered.update(row.id for row in settled.rows)  # an earlier one of them may have arrived
                self._learn(settled)
            case Outcome.REFUSED:
                self._blame(settled, Blame.ROW)
            case Outcome.REJECTED | Outcome.UNSENDABLE:
                self._blame(settled, Blame.ROW_FOR_GOOD)
            case Outcome.NACKED:
                self.queue.put_later(settled.rows)
            case Outcome.UNKNOWN | Outcome.SUSPECT:
                # The broker may have taken them: the consumer is told that they are repeats.
                self._redelivered.update(row.id for row in settled.rows)
                self.queue.put_first(settled.rows)
            case _:
                assert_never(settled.outcome)
        if self._probing:
            self._probing.difference_update(row.id for row in settled.rows)
        if self._stopped:
            self.settled.set()
        self.pump()

    def _learn(self, barred: Settled) -> None:
        """Ask for exchanges from now on if one has closed the channel that all rows share."""
        row = barred.rows[0]
        if self._prober is not None and row.id not in self._probing and names_address(barred.reason):
            self.queue.checks.begin(self._prober.router.address(row), barred.reason)

    def _refuse(self, rows: Sequence[Row], reason: str) -> None:
        self._blame(Settled(rows, Outcome.BARRED, reason), Blame.ADDRESS)

    def _blame(self, settled: Settled, blame: Blame) -> None:
        self.faulty.extend(Fault(row, settled.reason, blame) for row in settled.rows)
        self.settled.set()

    def take_settled(self) -> tuple[list[Row], list[Fault]]:
        """Return what is settled since the last call; calling it says that everything before is in the table.

        A faulty row's key stays held until `queue.put_off`, `release_key` or `remove_followers`.
        """
        self.settled.clear()
        self._taken, faulty = self.confirmed, self.faulty
        self.confirmed, self.faulty = [], []
        return self._taken, faulty

    def give_back(self, lanes: Collection[int]) -> list[Row]:
        """Give up the rows of these lanes and return them, but for those that are in flight or settled."""

        def is_leaving(row: Row) -> bool:
            return row.lane in lanes

        heads, waiting = self.queue.withdraw(is_leaving)
        for row in heads:
            waiting += self.queue.remove_followers(row)
        rows = [*heads, *waiting]
        self._redelivered.difference_update(row.id for row in rows)
        return rows

    async def wait_settled(self) -> bool:
        """Wait for settled rows; False: it has stopped, and none will come.

        Calling it says that the rows taken before are in the table.
        """
        self._taken = []
        while not (self.confirmed or self.faulty):
            if self._stopped and not self.in_flight:
                return False
            self.settled.clear()
            await self.settled.wait()
        return True

    def wake(self) -> None:
        """Wake the task that waits for `settled`: it has something else to do."""
        self.settled.set()

    def stop(self) -> None:
        """Send no more. What is in flight is still settled; the rest stays pending in the table."""
        self._stopped = True
        self.queue.drop_unsent()
        self.settled.set()

    async def abandon(self) -> None:
        """Forget every row: the session that held their lanes is lost. Returns when nothing is in flight any more.

        What the broker confirmed is remembered: read again, it is marked without being sent again.
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
        """Send what there is room for; call it when the lanes are known to be ours again."""
        wire, queue = self._wire, self.queue
        if wire is None or not queue.ready or self._stopped or not self._may_send():
            return
        if queue.alone and self._prober is not None:
            self._probe(self._prober)
        limit = 1 if queue.suspects else self._max_in_flight
        if monotonic() < queue.live_until:
            limit = max(1, limit // LIVE_PART)
        ready = queue.ready
        room = min(limit - self.in_flight + len(self._probing), len(ready))
        if room > 0 and room >= min(len(ready), limit // REFILL):
            if queue.checks.is_on and self._prober is not None:
                rows = queue.take_checked(room, self._prober)
            else:
                rows = [ready.popleft() for _ in range(room)]
            if rows:
                self.in_flight += len(rows)
                wire.send(rows, self._redelivered)

    def _probe(self, prober: Prober) -> None:
        for row in self.queue.take_alone():
            self._probing.add(row.id)
            self.in_flight += 1
            prober.send(row, redelivered=row.id in self._redelivered)
