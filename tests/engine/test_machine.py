"""Any order of commits, reads, outcomes, marks and losses: what is sent, and what is sent before what.

Tail, gate and sender are real, the table and the broker are not (world.py): so thousands of courses fit into seconds.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.errors import LockNotAvailable

from relay.config.settings import KeyPolicy, RelaySettings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read import positions, tail
from relay.engine.read.gate import Gate, KeysUnderWay, ParkedKeys, QuarantinedRoute
from relay.engine.read.tail import Tail
from relay.engine.row import Address, Outcome, Row, Settled
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession
from tests.engine.recording_wire import RecordingWire
from tests.engine.world import LANES, GivesUp, OpenTransaction, SteppedLoop, World, WorldSession

BETWEEN = 0.03  # seconds: two steps are longer than the tail's GAP
ANY = st.integers(0, 1_000)
HERE, ELSEWHERE = Address(b"", b"here"), Address(b"", b"elsewhere")


class Relaying(RuleBasedStateMachine):
    """Writers, a relay, and a broker that does what it likes."""

    @initialize(
        policy=st.sampled_from(KeyPolicy),
        rows=st.sampled_from([4, 12, 200]),
        in_flight=st.sampled_from([1, 5]),
        attempts=st.integers(1, 2),
    )
    def start(self, policy: KeyPolicy, rows: int, in_flight: int, attempts: int) -> None:
        self.world = World()
        self.loop = SteppedLoop(lambda: self.world.clock)
        clock = SimpleNamespace(monotonic=self.loop.time)
        # Small ones, so that transactions grow old, and lanes fall far back, within a few rows.
        self.patches = (
            patch.multiple(tail, time=clock),
            patch.object(positions, "FAR", 3),
            patch.object(positions, "NEAR", 2),
        )
        for each in self.patches:
            each.start()
        self.settings = RelaySettings(
            key_policy=policy,
            max_window_rows=rows,
            max_in_flight=in_flight,
            max_attempts=attempts,
            sweep_interval=5.0,
            node="model",
        )
        self.policy = DeliveryPolicy.of(self.settings.ordering, policy)
        self.wire = RecordingWire()
        self.seen = 0  # of wire.sent
        self.first_sent: set[int] = set()
        self.put_back = set[int]()  # refused rows that a lock has kept from being parked
        self.confirmed: set[int] = set()
        self.parked: list[Row] = []  # that hold their keys
        self.amid_asking: Callable[[], None] | None = None
        self.loop.do(self._connect())

    async def _connect(self) -> None:
        self.sender = Sender(self.policy, self.settings.max_in_flight)
        self.sender.attach(self.wire)
        await self._open_session()

    async def _open_session(self) -> None:
        self.session = WorldSession(self.world)
        self.session.lanes.take(range(LANES))
        session = cast("LaneSession", self.session)
        self.tail = Tail(session, self.settings, self.policy, GivesUp())
        self.tail.enter(range(LANES), self.world.floors())
        self.gate = Gate(self.tail, self.session.lanes, lambda _: HERE)
        for row in self.parked:
            self.gate.parked.add(row)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            for transaction in list(self.world.running.values()):
                self.world.commit(transaction)
            self.take_all_lanes()
            for _ in range(2_000):
                if all(written.state != "pending" for written in self.world.table.values()):
                    break
                self._carry(1.0)
            left = [id_ for id_, written in self.world.table.items() if written.state == "pending"]
            assert not left, f"rows {left} are never sent"
            assert self.tail.sweep_finds == 0, "only the sweep found them"
        finally:
            for each in self.patches:
                each.stop()
            self.loop.close()

    @rule(keys=st.lists(st.integers(0, 5), min_size=1, max_size=4), commit=st.booleans())
    def write(self, keys: list[int], commit: bool) -> None:
        transaction = self.world.begin()
        for key in keys:
            self.world.insert(transaction, key)
        if commit:
            self.world.commit(transaction)

    @precondition(lambda self: self.world.running)
    @rule(which=ANY, key=st.integers(0, 5))
    def write_on(self, which: int, key: int) -> None:
        self.world.insert(self._running(which), key)

    @precondition(lambda self: self.world.running)
    @rule(which=ANY, commit=st.booleans())
    def end(self, which: int, commit: bool) -> None:
        (self.world.commit if commit else self.world.roll_back)(self._running(which))

    @rule(seconds=st.sampled_from([0.003, 0.1, 2.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.clock += seconds
        self.loop.do(asyncio.sleep(0))

    @rule()
    def read(self) -> None:
        if not self.tail._positions.has_room():
            return
        self.world.clock += BETWEEN
        self.session.reads = 0
        self._offer(self.loop.do(self.tail._next_rows()))

    @precondition(lambda self: self.tail._ahead.after)
    @rule()
    def read_ahead(self) -> None:
        if self.tail._positions.has_room():
            self.world.clock += BETWEEN
            self._offer(self.loop.do(self.tail._rows_ahead()), behind=())

    def _offer(self, window: list[Row], behind: Collection[int] | None = None) -> None:
        self.sender.offer(self.loop.do(self.gate.admit(window, self, self)), behind=behind)

    async def park_behind(self, rows: Sequence[Row]) -> None:
        self._park_behind(rows)

    def _park_behind(self, rows: Sequence[Row]) -> None:
        """Park them, but for those whose key has no parked row any more: they are read again, with what comes first."""
        keys = {row.key for row in self.parked}
        self._park([row for row in rows if row.key in keys])
        if left := [row for row in rows if row.key not in keys]:
            for row in left:
                self.gate.parked.remove(row)
            self.tail.read_again(left)

    @precondition(lambda self: self.parked)
    @rule(which=ANY)
    def release(self, which: int) -> None:
        """Let an operator retry a parked row, and those behind it; the relay does not hear of it."""
        key = self.parked[which % len(self.parked)].key
        self.parked = [row for row in self.parked if row.key != key]
        self.world.change([], "")
        for written in self.world.table.values():
            if written.row.key == key and written.state == "parked":
                written.state, written.attempts, written.due = "pending", 0, self.world.clock

    is_outdated = False

    async def load(self) -> None:
        raise AssertionError("no operator changes a route")

    async def set_aside(self, rows: Sequence[Row]) -> None:
        assert not rows, "their address works"

    async def set_aside_followers(self, rows: list[Row]) -> list[Row]:
        if self.amid_asking is not None:
            self.amid_asking()
        return rows

    def send_alone(self, row: Row) -> None:
        raise AssertionError(f"{row.id} is no probe")

    @rule(key=st.integers(0, 5), is_asked=st.booleans(), is_released=st.booleans())
    def park(self, key: int, is_asked: bool, is_released: bool) -> None:
        """Few courses come to this by themselves: a row is parked before a later one of its key is read, or meanwhile.

        Args:
            is_asked: another address is in quarantine, so the gate asks the table about the rows that were read. The
                row is parked during that.
            is_released: an operator retries the row before those behind it are parked.
        """
        self.write([key, key], commit=True)
        for _ in range(10):
            self._carry(2.0, refused=key)
            if self.sender.faulty:
                break
        self.write([key], commit=True)
        if is_asked:
            self.gate.routes[ELSEWHERE] = QuarantinedRoute(1, "it does not work", 0)
            self.amid_asking = partial(self.mark, is_released=is_released)
        else:
            self.mark(is_released=is_released)
        for _ in range(2):
            self.pass_time(2.0)
            self.read()
        self.amid_asking = None
        self.gate.routes.clear()

    @precondition(lambda self: len(self.world.running) > 1)
    @rule(which=ANY, other=ANY)
    def read_while_transactions_end(self, which: int, other: int) -> None:
        """One ends before a read and one just after it: before the next, if the first makes the tail go back."""
        self.world.commit(self._running(which))
        later = self._running(other)
        if self.tail._positions.has_room():
            self.session.between_reads = partial(self._commit, later)
            self.read()
            if self.session.between_reads is not None:
                self.session.between_reads = None
                self.world.commit(later)

    @rule(answers=st.integers(0, 2))
    def read_in_vain(self, answers: int) -> None:
        """Another session's lock ends the read after so many statements; then the tail reads again (`retried`)."""
        self.session.answers = answers
        with suppress(LockNotAvailable):
            self.read()
        self.session.answers = inf

    @rule(lanes=st.sets(st.integers(0, LANES - 1), min_size=1))
    def save_floors(self, lanes: set[int]) -> None:
        """Not all of them: another session may have held the others."""
        self.world.saved |= {lane: read for lane, read in self.tail.floors().items() if lane in lanes}

    @rule(lanes=st.sets(st.integers(0, LANES - 1), min_size=1))
    def leave_lanes(self, lanes: set[int]) -> None:
        self.session.lanes.leave(lanes & {*self.session.lanes.held})

    @rule()
    def give_up_what_leaves(self) -> None:
        leaving = self.session.lanes.leaving
        self.tail.hand_back(self.sender.give_back(leaving))
        self.session.lanes.release([lane for lane in leaving if self.tail.is_clear(lane)])

    @rule()
    def take_all_lanes(self) -> None:
        for _ in range(100):  # what leaves must go first, or it may come twice
            if not self.session.lanes.leaving:
                break
            self.give_up_what_leaves()
            while self.wire.open:
                self.settle(0, Outcome.CONFIRMED)
            self.mark()
        lanes = [lane for lane in range(LANES) if lane not in self.session.lanes.held]
        self.session.lanes.take(lanes)
        self.tail.enter(lanes, self.world.floors())

    @rule(rounds=st.integers(1, 6), key=st.integers(0, 5))
    def go_on_for_a_while(self, rounds: int, key: int) -> None:
        """Many courses begin with this: what was seen long ago is then far behind."""
        for _ in range(rounds):
            self.write([key, key + 1, key + 2], commit=True)
            self._carry(0.1)

    @precondition(lambda self: self.wire.open)
    @rule(which=ANY, outcome=st.sampled_from([*[Outcome.CONFIRMED] * 3, Outcome.NACKED, Outcome.REFUSED]))
    def settle(self, which: int, outcome: Outcome) -> None:
        row = self.wire.open.pop(which % len(self.wire.open))
        if outcome is Outcome.CONFIRMED:
            self.confirmed.add(row.id)
        self.sender.settle(Settled((row,), outcome, "because"))

    @rule()
    def lose_the_broker(self) -> None:
        self.sender.attach(None)
        self._lose_what_is_in_flight()
        self.sender.attach(self.wire)

    @rule(is_locked=st.booleans())
    def mark(self, is_locked: bool = False, is_released: bool = False) -> None:
        """Write what has settled; a lock may keep a row from being parked, which is then put back."""
        confirmed, faulty = self.sender.take_settled()
        self.world.clock += BETWEEN
        if confirmed:
            self.session.written_at = self.world.clock
            self.world.change([row.id for row in confirmed], "sent")
            self.tail.forget(confirmed)
        for row, reason, _ in faulty:
            written = self.world.table[row.id]
            if is_locked and written.attempts + 1 >= self.settings.max_attempts:
                self.tail.put_back([row, *self._leave_key(row)], self.world.clock + 0.3)
                self.put_back.add(row.id)
                continue
            written.attempts += 1
            if written.attempts < self.settings.max_attempts:
                written.due = self.world.clock + 0.5
                self.tail.back_off(row, written.due, self.sender.queue.put_off(row))
                continue
            assert reason == "because"
            self._park([row])
            followers = self._leave_key(row)
            if self.settings.key_policy is KeyPolicy.HOLD:
                self.parked.append(row)
                self.gate.parked.add(row)
                if is_released:
                    self.release(-1)
                self._park_behind(followers)

    @rule()
    def lose_the_session(self) -> None:
        self.sender.attach(None)
        self._lose_what_is_in_flight()
        self.loop.do(self.sender.abandon())
        self.loop.do(self._open_session())
        self.sender.attach(self.wire)

    @invariant()
    def each_is_sent_after_its_predecessors(self) -> None:
        if not hasattr(self, "wire"):
            return
        keys = [row.key for row in self.wire.open]
        assert len(keys) == len(set(keys)), "two rows of one key are in flight"
        for row in self.wire.sent[self.seen :]:
            if row.id not in self.first_sent:
                self.first_sent.add(row.id)
                for before in self._predecessors(row):
                    assert before in self.confirmed or self._is_passed(before), f"{row.id} was sent before {before}"
        self.seen = len(self.wire.sent)

    def _carry(self, seconds: float, refused: int | None = None) -> None:
        """Read, send and mark; a row of the key `refused` is refused, and not marked when that is its last attempt."""
        self.pass_time(seconds)
        self.read()
        while self.wire.open:
            self.each_is_sent_after_its_predecessors()
            is_refused = self.wire.open[0].aggregate_id == str(refused).encode()
            self.settle(0, Outcome.REFUSED if is_refused else Outcome.CONFIRMED)
        is_last = any(fault.row.attempts + 1 >= self.settings.max_attempts for fault in self.sender.faulty)
        if refused is None or not is_last:
            self.mark()
        self.each_is_sent_after_its_predecessors()

    def _predecessors(self, row: Row) -> list[int]:
        """Return the rows of its key that were committed before its transaction began."""
        own = self.world.table[row.id]
        return [
            id_
            for id_, other in self.world.table.items()
            if id_ < row.id and other.row.key == row.key and other.committed < own.began
        ]

    def _is_passed(self, id_: int) -> bool:
        """Whether a refused row may be passed over; one that is refused again and again is parked, or waits for it."""
        is_refused = self.world.table[id_].attempts > 0 or id_ in self.put_back
        return self.settings.key_policy is KeyPolicy.SKIP and is_refused

    async def _commit(self, transaction: OpenTransaction) -> None:
        self.world.commit(transaction)

    def _running(self, which: int) -> OpenTransaction:
        return list(self.world.running.values())[which % len(self.world.running)]

    def _leave_key(self, row: Row) -> list[Row]:
        if self.settings.key_policy is KeyPolicy.HOLD:
            return self.sender.queue.remove_followers(row)
        self.sender.queue.release_key(row)
        return []

    def _park(self, rows: Sequence[Row]) -> None:
        if rows:
            self.world.change([row.id for row in rows], "parked")
            self.tail.forget(rows)

    def _lose_what_is_in_flight(self) -> None:
        lost, self.wire.open = self.wire.open, []
        if lost:
            self.sender.settle(Settled(lost, Outcome.UNKNOWN, "lost"))


TestRelaying = Relaying.TestCase
TestRelaying.settings = settings(max_examples=300, stateful_step_count=50)


def forget_what_was_parked_meanwhile(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParkedKeys, "has_added", lambda *_: False)


def forget_parked_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParkedKeys, "add", lambda *_: None)


def forget_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    def let_all_go(keys: KeysUnderWay, rows: Iterable[Row]) -> Sequence[Row]:
        heads = list(rows)
        keys._behind.update({row.key: None for row in heads if row.key is not None})
        return heads

    patch.setattr(KeysUnderWay, "heads", let_all_go)
    patch.setattr(KeysUnderWay, "release_key", lambda *_: None)


def forget_what_is_read_again(patch: pytest.MonkeyPatch) -> None:
    read_again = Tail.read_again

    def read_again_and_forget(tail: Tail, rows: Collection[Row]) -> None:
        read_again(tail, rows)
        tail.left_keys.clear()

    patch.setattr(Tail, "read_again", read_again_and_forget)


HOLES = [forget_what_was_parked_meanwhile, forget_parked_keys, forget_what_is_under_way, forget_what_is_read_again]


@pytest.mark.parametrize("plant", HOLES, ids=lambda plant: plant.__name__)
def test_a_hole_in_the_gate_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    few = settings(TestRelaying.settings, phases=[Phase.generate], derandomize=True, database=None)

    with pytest.raises(AssertionError, match=r"was sent before|are in flight"):
        run_state_machine_as_test(Relaying, settings=few)
