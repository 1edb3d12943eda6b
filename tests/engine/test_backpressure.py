"""Rows of an address that refuses wait in line; the wire here is a list, so that each outcome can be chosen."""

from typing import cast

import pytest

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send import backpressure
from relay.engine.send.probe import Prober
from relay.engine.send.routes import Router
from relay.engine.send.sender import Sender
from tests.engine.recording_wire import RecordingWire, attached
from tests.engine.rows import rows
from tests.support.eventually import eventually

ROWS = rows([*range(1, 301)])


class Routes:
    """A prober that only knows the router: every row has the same address."""

    router = Router((), "outbox")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of refusals in a row of all waits, which are over at once."""
    waits: list[int] = []

    def note(refusals: int, *_: float, multiplier: float) -> float:
        assert multiplier > 1
        waits.append(refusals)
        return 0.0

    monkeypatch.setattr(backpressure, "backoff", note)
    return waits


@pytest.fixture
async def full(waits: list[int]) -> tuple[Sender, RecordingWire]:
    """A sender whose first four rows were refused, while all others of the address wait."""
    assert not waits
    sender, wire = attached(max_in_flight=4)
    sender.attach_prober(cast("Prober", Routes()))
    sender.offer(ROWS)
    settle(sender, wire, Outcome.NACKED, 4)
    assert wire.open == []
    return sender, wire


def settle(sender: Sender, wire: RecordingWire, outcome: Outcome, number: int = 1) -> list[Row]:
    settled = [wire.open.pop(0) for _ in range(number)]
    sender.settle(Settled(settled, outcome))
    return settled


async def test_while_an_address_refuses_one_row_at_a_time_is_tried(
    full: tuple[Sender, RecordingWire], waits: list[int]
) -> None:
    sender, wire = full

    for _ in range(5):
        await eventually(lambda: len(wire.open) == 1, "one is tried")
        settle(sender, wire, Outcome.NACKED)

    assert waits == [1, 2, 3, 4, 5, 6]
    assert len({row.id for row in wire.sent}) == 9, "each try is another row"
    assert sender.waiting == len(ROWS)


async def test_an_address_that_takes_rows_again_gets_twice_as_many_each_time(
    full: tuple[Sender, RecordingWire],
) -> None:
    sender, wire = full
    await eventually(lambda: len(wire.open) == 1, "one is tried")

    settle(sender, wire, Outcome.CONFIRMED)
    assert len(wire.open) == 2
    settle(sender, wire, Outcome.CONFIRMED, 2)
    assert len(wire.open) == 4
    while wire.open:
        settle(sender, wire, Outcome.CONFIRMED)

    assert len(sender.confirmed) == len(ROWS)
    assert sender.queue.backpressure.lines == {}


async def test_a_row_that_is_refused_alone_keeps_no_others_back(
    full: tuple[Sender, RecordingWire], waits: list[int]
) -> None:
    """As by a deduplicating queue, which refuses repeats."""
    sender, wire = full
    repeats = {row.id for row in ROWS[:4]}
    await eventually(lambda: len(wire.open) == 1, "one is tried")

    while wire.open:
        is_repeat = wire.open[0].id in repeats
        settle(sender, wire, Outcome.NACKED if is_repeat else Outcome.CONFIRMED)

    assert waits == [1], "the refused repeats let no row wait"
    assert {row.id for row in sender.confirmed} == {row.id for row in ROWS[4:]}


async def test_rows_that_were_put_away_after_a_refusal_let_new_ones_pass(
    full: tuple[Sender, RecordingWire],
) -> None:
    """As repeats do that come back from quarantine; their address still refuses then."""
    sender, wire = full
    await eventually(lambda: len(wire.open) == 1, "one is tried")
    settle(sender, wire, Outcome.NACKED)
    heads, _ = sender.queue.withdraw(lambda _: True)
    for row in heads:
        sender.queue.remove_followers(row)

    sender.offer(ROWS)
    await eventually(lambda: len(wire.open) == 1, "one is tried")

    assert wire.open[0].id not in {row.id for row in wire.sent[:-1]}


async def test_rows_that_were_put_away_after_a_refusal_are_refused_alone(waits: list[int]) -> None:
    sender, wire = attached(max_in_flight=50)
    sender.attach_prober(cast("Prober", Routes()))
    sender.offer(ROWS)
    settle(sender, wire, Outcome.NACKED, 50)
    repeats = {row.id for row in wire.sent}
    heads, _ = sender.queue.withdraw(lambda _: True)
    for row in heads:
        sender.queue.remove_followers(row)

    sender.offer(ROWS)
    while len(sender.confirmed) < len(ROWS) - len(repeats):
        await eventually(lambda: bool(wire.open), "one is tried")
        settle(sender, wire, Outcome.NACKED if wire.open[0].id in repeats else Outcome.CONFIRMED)

    assert len(waits) == 1, "a repeat lets new rows wait only before a new one was taken"
