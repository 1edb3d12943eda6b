"""Two relays that hand over lanes, in every interleaving. Tail, floors, lanes and sender are real, the servers are not.

A `Course` is one state of table, broker and relays. `explore` visits each state that the steps lead to, once, and
checks it. The table and its locks are those of `world.py`. The broker loses what was in flight when a relay dies.
"""

import asyncio
import io
import pickle
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from functools import partial
from itertools import count
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

from relay.config.settings import KeyPolicy, Ordering, RelaySettings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.nodes.lanes import Lanes
from relay.engine.read import positions, tail
from relay.engine.read.floors import Floors
from relay.engine.read.gate import Gate
from relay.engine.read.tail import Tail
from relay.engine.row import Address, Outcome, Row, Settled
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession
from relay.observe.histogram import Histogram
from relay.runtime.health import Health
from tests.engine.world import GivesUp, OpenTransaction, SteppedLoop, World, WorldSession, WrittenRow

LANES = 2
POLICY = DeliveryPolicy.of(Ordering.KEY, KeyPolicy.HOLD)
SETTINGS = RelaySettings(node="model", sweep_interval=1e9)
ROW_BY_ROW = RelaySettings(node="model", sweep_interval=1e9, max_window_rows=16)  # a lane brings one row a read
STEP = 1.0  # seconds


class Limits(NamedTuple):
    """What a course may have of what could otherwise go on without end.

    Attributes:
        rows: of these keys in turn; half of them are there from the start.
        moves: how often a relay begins to take lanes, or to leave some.
        saves: of floors that differ from what is saved.
        late: the number of the row whose transaction commits at any time; 0: no row.
        refusals: rows that the broker refuses once.
        put_back: refused rows that a lock keeps from being put away.
        left: reads of rows whose key an operator has just released: they are left to the table.
        kills: of relays.
        copies: of rows and floors to another database, where new relays go on. The late transaction may roll back.
        ahead: reads ahead of a backlog that bring rows.
        keys: by default each in a separate lane.
        settings: of both relays.
    """

    rows: int
    moves: int
    saves: int
    late: int = 0
    refusals: int = 0
    put_back: int = 0
    left: int = 0
    kills: int = 0
    copies: int = 0
    ahead: int = 0
    keys: tuple[int, ...] = (0, 1)
    settings: RelaySettings = SETTINGS


class Relay:
    """A relay from the start of its session to its end; also the wire to which it sends."""

    def __init__(self, course: "Course") -> None:
        self.course = course
        self.session = WorldSession(course.world)
        session = cast("LaneSession", self.session)
        self.open: list[Row] = []
        self.sender = Sender(POLICY, max_in_flight=LANES)
        self.sender.attach(cast("Any", self))
        self.tail = Tail(session, course.limits.settings, POLICY, GivesUp())
        self.gate = Gate(self.tail, session.lanes, address_of)
        self.floors = Floors(session, self.tail, GivesUp())
        self.lanes = Lanes(session, self.tail, self.sender, floors=self.floors, health=Health(), learn=_learn_nothing)

    def send(self, rows: list[Row], _: set[int]) -> None:
        for row in rows:
            self.course.check_sent(row, self.session)
        self.open += rows

    async def read(self, between: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Read, and once more after a heartbeat: so the floors rise as soon as they ever can."""
        for tick in (0.0, STEP / 4):
            self.course.world.change([], "")
            self.session.written_at = self.course.world.clock + tick
            if self.tail._positions.has_room():
                self.session.reads, self.session.between_reads = 0, between
                rows = await self.tail._next_rows()
                self.session.between_reads = between = None
                self.sender.offer(self.gate.free_now(rows))

    async def read_ahead(self, between: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self.session.between_reads = between
        rows = await self.tail._rows_ahead()
        self.session.between_reads = None
        self.course.ahead += bool(rows)
        self.sender.offer(self.gate.free_now(rows), behind=())

    async def read_what_was_held(self) -> None:
        """Read rows of keys that are held, as far as the relay knows; the table does not hold them any more."""
        self.course.left += 1
        self.tail.read_again(await self.tail._next_rows())

    async def settle(self, row: Row, outcome: Outcome) -> None:
        self.open.remove(row)
        if outcome is Outcome.CONFIRMED:
            self.course.confirmed.add(row.id)
        self.sender.settle(Settled((row,), outcome, "because"))

    async def mark(self, *, is_locked: bool = False) -> None:
        """Do what the marker does; a refused row backs off, or is put back as it cannot be put away."""
        confirmed, faulty = self.sender.take_settled()
        self.course.world.change([row.id for row in confirmed], "sent")
        self.tail.forget(confirmed)
        for row, _, _ in faulty:
            if is_locked:
                self.course.put_back += 1
                self.tail.put_back([row, *self.sender.queue.remove_followers(row)], self.course.world.clock + STEP)
                continue
            written = self.course.world.table[row.id]
            written.attempts, written.due = 1, self.course.world.clock + 2 * STEP
            self.tail.back_off(row, written.due, self.sender.queue.put_off(row))

    async def hold(self, number: int) -> None:
        """Hold so many lanes from now on: take free ones, or begin to leave some."""
        self.lanes.aim(number, ())
        await self.lanes._take_or_leave()

    async def give_up(self) -> None:
        await self.lanes._give_up()

    def print(self) -> Any:
        """Return all that its next steps depend on, without the time."""
        position, queue = self.tail._positions, self.sender.queue
        seen = position._open
        lanes = self.session.lanes
        return (
            tuple(lanes.held),
            tuple(lanes.leaving),
            ids(self.open),
            ids(queue.ready),
            tuple(sorted((key, ids(rows or ())) for key, rows in queue.keys._behind.items())),
            ids(self.sender.confirmed),
            ids(fault.row for fault in self.sender.faulty),
            tuple((lane, position._floors.get(lane, -1), tuple(position._window.ids(lane))) for lane in lanes.held),
            tuple(sorted(position._gone_back.items())),
            tuple(seen._since.values()),  # of the one transaction that stays open
            tuple(at for _, at in seen._positions),
            seen.watermark(self.tail._known_until),
            tuple(sorted(self.tail.left_keys)),
            tuple(sorted((key, each.first) for key, each in self.tail.backing_off._waits.items() if key)),
            tuple(sorted(self.tail._ahead.after.items())),
            self.floors._saved == self.tail.floors(),
        )


class Step(NamedTuple):
    """What may happen next."""

    name: str
    do: Callable[[], Coroutine[Any, Any, None]]


class Course:
    """A state, and the steps that lead on."""

    def __init__(self, limits: Limits) -> None:
        self.world = World()
        self.limits = limits
        self.relays = [Relay(self) for _ in range(2)]
        self.late: OpenTransaction | None = None
        self.written = self.refusals = self.put_back = self.left = self.kills = self.moves = self.saves = 0
        self.ahead = self.copies = 0
        self.sent: set[int] = set()
        self.confirmed: set[int] = set()

    def steps(self) -> Iterator[Step]:
        """Return the steps that may come next."""
        if self.written < self.limits.rows:
            yield Step("write", self.write)
        if self.late is not None:
            yield Step("commit the late one", self.commit)
            if self.limits.copies:
                yield Step("roll the late one back", self.roll_back)
        if self.copies < self.limits.copies:
            yield Step("copy to another database", self.copy)
        for number, relay in enumerate(self.relays, start=1):
            for step in self._steps_of(relay):
                yield step._replace(name=f"{number}: {step.name}")

    def _steps_of(self, relay: Relay) -> Iterator[Step]:
        lanes = relay.session.lanes
        if lanes.staying:
            yield Step("read", relay.read)
            if self.limits.late and self.late is None:
                between = partial(leave_all, relay)
                yield Step("read, and leave and give up before it reads again", partial(relay.read, between))
            yield from self._reads_ahead(relay)
            if self.left < self.limits.left and relay.tail._positions.has_room():
                yield Step("read what was held", relay.read_what_was_held)
        for row in relay.open:
            yield Step(f"confirm {row.id}", partial(relay.settle, row, Outcome.CONFIRMED))
            if self.refusals < self.limits.refusals and not row.attempts:
                yield Step(f"refuse {row.id}", partial(self.refuse, relay, row))
        if relay.sender.confirmed or relay.sender.faulty:
            yield Step("mark", relay.mark)
        if relay.sender.faulty and self.put_back < self.limits.put_back:
            yield Step("mark, and put back", partial(relay.mark, is_locked=True))
        for number in range(LANES + 1) if self.moves < self.limits.moves else ():
            free = LANES - len(self.world.owners)
            if number < len(lanes.staying) or len(lanes.staying) < number <= len(lanes.staying) + free:
                yield Step(f"hold {number}", partial(self.hold, relay, number))
        if lanes.leaving:
            yield Step("give up", relay.give_up)
        if lanes.held and self.saves < self.limits.saves:
            yield Step("save", partial(self.save, relay))
        if self.kills < self.limits.kills and lanes.held:
            yield Step("kill", partial(self.kill, relay))

    def _reads_ahead(self, relay: Relay) -> Iterator[Step]:
        if self.ahead < self.limits.ahead and relay.tail._ahead.after and relay.tail._positions.has_room():
            yield Step("read ahead", relay.read_ahead)
            between = partial(leave_all, relay)
            yield Step("read ahead, and leave and give up meanwhile", partial(relay.read_ahead, between))

    async def write(self) -> None:
        """Write half of the rows."""
        for _ in range(self.limits.rows // 2):
            transaction = self.world.begin()
            self.world.insert(transaction, self.limits.keys[self.written % len(self.limits.keys)])
            self.written += 1
            if self.written == self.limits.late:
                self.late = transaction
            else:
                self.world.commit(transaction)

    async def hold(self, relay: Relay, number: int) -> None:
        self.moves += 1
        await relay.hold(number)

    async def save(self, relay: Relay) -> None:
        before = dict(self.world.saved)
        await relay.floors.save()
        self.saves += self.world.saved != before

    async def commit(self) -> None:
        assert self.late is not None
        self.world.commit(self.late)
        self.late = None

    async def roll_back(self) -> None:
        assert self.late is not None
        self.world.roll_back(self.late)
        self.late = None

    async def copy(self) -> None:
        self.copies += 1
        self.late = None
        self.world.owners.clear()
        self.world.copy()
        self.relays = [Relay(self) for _ in range(2)]

    async def refuse(self, relay: Relay, row: Row) -> None:
        self.refusals += 1
        await relay.settle(row, Outcome.REFUSED)

    async def kill(self, relay: Relay) -> None:
        self.kills += 1
        for lane in relay.session.lanes.held:
            del self.world.owners[lane]
        self.relays[self.relays.index(relay)] = Relay(self)

    def check_sent(self, row: Row, session: WorldSession) -> None:
        assert self.world.owners.get(row.lane) is session, f"{row.id} is sent by a relay that does not hold its lane"
        if row.id not in self.sent:
            self.sent.add(row.id)
            for before, other in self.world.table.items():
                if before < row.id and other.row.key == row.key and other.committed < self.world.table[row.id].began:
                    assert before in self.confirmed, f"{row.id} is sent before {before}"

    def check(self) -> None:
        """Check what holds at any time."""
        rows = {**self.world.table, **{each.row.id: each for each in self.late.rows}} if self.late else self.world.table
        for lane, saved in self.world.saved.items():
            if self.world.saved_in[lane] != self.world.database:
                continue
            for id_, written in rows.items():
                if id_ <= saved.floor and written.row.lane == lane and is_untouched(written):
                    assert written.xid in saved.running, f"the saved floor {saved.floor} is not below {id_}"
        for relay in self.relays:
            for lane in relay.session.lanes.staying:
                for id_, written in self.world.table.items():
                    if written.row.lane == lane and is_untouched(written):
                        assert self._is_reached(relay, id_, written), f"only a sweep finds {id_}"

    def _is_reached(self, relay: Relay, id_: int, written: WrittenRow) -> bool:
        position, lane = relay.tail._positions, written.row.lane
        seen = position._open
        floor = min(position._floors[lane], seen.floor(seen.watermark(relay.tail._known_until)))
        waits = relay.tail.backing_off.first().get(lane, id_ + 1)
        return id_ > floor or id_ in position._window.ids(lane) or written.xid in seen._since or waits <= id_

    def print(self) -> Any:
        """Return what tells this state from others; the two relays are alike."""
        return (
            tuple((id_, each.state, each.attempts) for id_, each in sorted(self.world.table.items())),
            tuple(
                sorted(
                    (lane, read.floor, tuple(read.running.values()), self.world.saved_in[lane])
                    for lane, read in self.world.saved.items()
                )
            ),
            (
                self.written,
                self.late is None,
                self.refusals,
                self.put_back,
                self.left,
                self.kills,
                self.ahead,
                self.copies,
                self.moves,
                self.saves,
            ),
            tuple(sorted(self.sent)),
            tuple(sorted(self.confirmed)),
            tuple(sorted(relay.print() for relay in self.relays)),
        )


def address_of(_: Row) -> Address:
    return Address(b"", b"queue")


async def _learn_nothing(_lanes: Collection[int]) -> None:
    """Nothing is parked here."""


async def leave_all(relay: Relay) -> None:
    await relay.hold(0)
    await relay.give_up()


def is_untouched(written: WrittenRow) -> bool:
    """Whether a row waits and nothing but its position leads to it: it is not due, and has not failed."""
    return written.state == "pending" and not written.due


def ids(rows: Iterable[Row]) -> tuple[int, ...]:
    return tuple(row.id for row in rows)


# No step changes these, or depends on them.
SHARED = {FunctionType, SimpleNamespace, SteppedLoop, Health, Histogram, RelaySettings, DeliveryPolicy, Limits, count}


class Snapshots:
    """Keeps states as bytes. What no step changes is kept once, in its place stands a number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._kept: list[Any] = [loop]
        self._numbers: dict[Any, int] = {id(loop): 0}

    def take(self, course: Course) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        pickler.persistent_id = self._number  # type: ignore[method-assign]
        pickler.dump(course)
        return buffer.getvalue()

    def restore(self, taken: bytes) -> Course:
        unpickler = pickle.Unpickler(io.BytesIO(taken))
        unpickler.persistent_load = self._kept.__getitem__  # type: ignore[method-assign]
        return cast("Course", unpickler.load())

    def _number(self, value: Any) -> int | None:
        kind = type(value)
        if kind is Row:
            key: Any = value
        elif kind in SHARED:
            key = id(value)
        else:
            return None
        if key not in self._numbers:
            self._numbers[key] = len(self._kept)
            self._kept.append(value)
        return self._numbers[key]


def explore(limits: Limits) -> int:
    """Visit each state within the limits; return how many there are.

    Raises:
        AssertionError: something does not hold; the message has the steps that lead there.
    """
    now = [0.0]
    loop = SteppedLoop(lambda: now[0])
    small = patch.multiple(positions, GAP=0.0, NEAR=0, FAR=1)  # so that few rows are far
    with patch.multiple(tail, time=SimpleNamespace(monotonic=loop.time)), small:
        try:
            return _explore(limits, loop, now)
        finally:
            loop.close()


def _explore(limits: Limits, loop: SteppedLoop, now: list[float]) -> int:
    snapshots = Snapshots(loop)

    async def begin() -> Course:
        course = Course(limits)
        await course.write()
        return course

    first = loop.do(begin())
    came: dict[int, tuple[int, str]] = {hash(first.print()): (0, "")}
    todo = [(hash(first.print()), snapshots.take(first))]
    while todo:
        known, taken = todo.pop()
        course = snapshots.restore(taken)
        for number in range(len(list(course.steps()))):
            course = course if number == 0 else snapshots.restore(taken)
            steps = list(course.steps())
            now[0] = course.world.clock = course.world.clock + STEP
            try:
                loop.do(steps[number].do())
                course.check()
            except AssertionError as error:
                raise AssertionError(f"{error}\n" + "\n".join([*path(came, known), steps[number].name])) from error
            seen = hash(course.print())
            if seen not in came:
                came[seen] = known, steps[number].name
                todo.append((seen, snapshots.take(course)))
    return len(came)


def path(came: dict[int, tuple[int, str]], state: int) -> list[str]:
    """Return the steps that lead to a state."""
    steps: list[str] = []
    while came[state][1]:
        state, step = came[state]
        steps.append(step)
    return steps[::-1]
