"""Every order in which broker, buffer and relay may answer: nothing accepted is lost, and no key is out of order.

Neither server runs here: the broker is a list, the wire and the buffer do what the next step says.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.wire import Wire
from relay.errors import NotAcceptedError
from relay.publisher import delivery_path as module
from relay.publisher.buffer import Buffer, BufferedRows
from relay.publisher.delivery_path import DeliveryPath
from relay.publisher.entry import Unaccepted
from relay.runtime.health import Health
from tests.publisher.events import measured

TURNS = 8  # of the event loop after each step, so that each task that can go on does


class PathStep(Enum):
    """What may happen next."""

    PUBLISH = auto()
    SETTLE = auto()  # one on the direct way
    COMMIT = auto()  # what is being written into the buffer
    RELAY = auto()  # sends a row
    MARK = auto()  # a row that was sent
    CUT = auto()
    CONNECT = auto()


Steps = list[tuple[PathStep, int, bool]]  # what, which of them, and whether it goes well
STEPS = st.lists(st.tuples(st.sampled_from(PathStep), st.integers(0, 2), st.booleans()), min_size=5, max_size=60)
REST = (PathStep.SETTLE, PathStep.COMMIT, PathStep.RELAY, PathStep.MARK)


@dataclass
class BrokerAndTable:
    """The broker, and the rows of a table with the relay that sends them."""

    arrived: list[bytes] = field(default_factory=list)  # message ids
    rows: list[Row] = field(default_factory=list)
    sent: int = 0  # of these rows: they have arrived, and are not yet marked
    in_flight: list[Row] = field(default_factory=list)
    writes: list[tuple[Sequence[Unaccepted], asyncio.Future[bool]]] = field(default_factory=list)

    publisher = None

    async def write(self, entries: Sequence[Unaccepted]) -> None:
        committed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.writes.append((entries, committed))
        if not await committed:
            raise NotAcceptedError("no")

    async def left(self) -> BufferedRows:
        await asyncio.sleep(0)
        return BufferedRows(len(self.rows), 0)

    def send(self, rows: Iterable[Row], _redelivered: set[int]) -> None:
        self.in_flight += rows

    def settle(self, path: DeliveryPath, which: int, *, confirm: bool) -> None:
        if self.in_flight:
            row = self.in_flight.pop(which % len(self.in_flight))
            if confirm or which == 0:  # without a confirm it has arrived, or not
                self.arrived.append(row.message_id)
            path.direct.settle(Settled((row,), Outcome.CONFIRMED if confirm else Outcome.UNKNOWN, ""))

    def commit(self, *, works: bool) -> None:
        if self.writes:
            entries, committed = self.writes.pop()
            self.rows += [entry.row for entry in entries] if works else []
            committed.set_result(works)

    def relay(self) -> None:
        if self.sent < len(self.rows):
            self.arrived.append(self.rows[self.sent].message_id)
            self.sent += 1

    def mark(self) -> None:
        if self.sent:
            del self.rows[0]
            self.sent -= 1

    def cut(self, path: DeliveryPath, *, arrives: bool) -> None:
        path.direct.attach(None)
        lost, self.in_flight = self.in_flight, []
        self.arrived += [row.message_id for row in lost] if arrives else []
        if lost:
            path.direct.settle(Settled(lost, Outcome.UNKNOWN, "cut"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("BUFFER_LOOK", "LOOK_SHARE", "HOLD_LOOK"):
        monkeypatch.setattr(module, pause, 0)


@given(steps=STEPS)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_accepted_is_lost_or_overtaken(steps: Steps) -> None:
    asyncio.run(check(steps))


async def check(steps: Steps) -> None:
    ends = BrokerAndTable()
    wire = cast("Wire", ends)  # no more of either is asked for
    path = DeliveryPath(cast("Buffer", ends), Health(), 30.0)
    tasks = [asyncio.create_task(path.write()), asyncio.create_task(path.watch())]
    path.direct.attach(wire)
    entries: list[Unaccepted] = []
    number = sum(step is PathStep.PUBLISH for step, *_ in steps)
    rest = [(step, 0, True) for step in REST * (number + 1)]
    for step, which, is_well in [*steps, (PathStep.CONNECT, 0, True), *rest]:
        match step:
            case PathStep.PUBLISH:
                entries.append(Unaccepted.of(measured(len(entries), ("a", "b", None)[which]), 1000))
                path.enter(entries[-1])
            case PathStep.SETTLE:
                ends.settle(path, which, confirm=is_well)
            case PathStep.COMMIT:
                ends.commit(works=is_well)
            case PathStep.RELAY:
                ends.relay()
            case PathStep.MARK:
                ends.mark()
            case PathStep.CUT:
                ends.cut(path, arrives=is_well)
            case PathStep.CONNECT:
                path.direct.attach(wire)
            case _:
                assert_never(step)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()

    assert all(entry.accepted.done() for entry in entries)
    accepted = [entry.row for entry in entries if entry.accepted.exception() is None]
    first = {id_: place for place, id_ in reversed(list(enumerate(ends.arrived)))}
    assert [row for row in accepted if row.message_id not in first] == []
    for key in (b"a", b"b"):
        places = [first[row.message_id] for row in accepted if row.aggregate_id == key]
        assert places == sorted(places)
