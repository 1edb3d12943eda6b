"""Lanes move between two relays at every step: their holder sends the rows in order, and no row waits for a sweep.

A saved floor is below each row that was read and is not settled, whichever way the row was left to the table.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import pytest

from relay.engine.read import floors
from relay.engine.read.positions import LaneFloor, Positions
from relay.engine.read.tail import BackingOff, Tail
from relay.engine.row import Row
from tests.engine.hand_over import ROW_BY_ROW, Limits, explore

# Two keys of one lane, so that there is a backlog ahead of which to read.
one_lane = partial(Limits, saves=0, keys=(0, 3), settings=ROW_BY_ROW)

LARGER = {
    "hand-over": Limits(rows=6, moves=2, saves=1),
    "back and forth": Limits(rows=4, moves=3, saves=1),
    "late commit": Limits(rows=4, moves=2, saves=1, late=1),
    "refused row": Limits(rows=4, moves=2, saves=1, refusals=1),
    "row put back": Limits(rows=4, moves=2, saves=1, refusals=1, put_back=1),
    "released key": Limits(rows=4, moves=2, saves=1, left=1),
    "killed": Limits(rows=4, moves=2, saves=1, kills=1),
    "copied": Limits(rows=2, moves=2, saves=1, late=1, copies=1),
    "read ahead": one_lane(rows=6, moves=1, saves=1, late=2, ahead=1),
}


def test_no_interleaving_of_a_hand_over_loses_order() -> None:
    assert explore(Limits(rows=3, moves=2, saves=1)) > 100


@pytest.mark.drills
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("limits", LARGER.values(), ids=LARGER)
def test_no_longer_interleaving_loses_order(limits: Limits) -> None:
    """Relays move lanes, save floors, lose the broker's answers and are killed at any step; order and owner hold."""
    assert explore(limits) > 1000


def forget_what_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tail, "hand_back", Tail.forget)


def forget_what_is_left(patch: pytest.MonkeyPatch) -> None:
    def read_again(self: Tail, rows: Collection[Row]) -> None:
        self.forget(rows)

    patch.setattr(Tail, "read_again", read_again)


def forget_what_backs_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BackingOff, "first", lambda _: {})


def forget_what_is_put_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BackingOff, "put_back", lambda *_: None)


def save_above_what_is_put_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tail, "floors", lambda self: self._positions.floors(self._known_until))


def forget_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Positions, "_before", lambda *_: [])


def forget_what_runs(patch: pytest.MonkeyPatch) -> None:
    of_lanes = Positions.floors

    def without_running(self: Positions, known_until: float) -> dict[int, LaneFloor]:
        return {lane: read._replace(running={}) for lane, read in of_lanes(self, known_until).items()}

    patch.setattr(Positions, "floors", without_running)


def believe_another_database(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(floors, "is_of", lambda *_: True)


def give_up_amid_a_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Positions, "is_clear", lambda self, lane: not self._window.ids(lane))


def read_ahead_of_what_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Positions, "has_missed", lambda *_: False)


class PlantedBug(NamedTuple):
    """A bug, small limits within which it does harm, and what is found."""

    plant: Callable[[pytest.MonkeyPatch], None]
    limits: Limits
    finds: str


BUGS = [
    PlantedBug(forget_what_leaves, Limits(rows=3, moves=2, saves=1), "the saved floor"),
    PlantedBug(forget_what_is_under_way, Limits(rows=2, moves=2, saves=1), "the saved floor"),
    PlantedBug(give_up_amid_a_read, Limits(rows=2, moves=2, saves=0, late=1), "does not hold its lane"),
    PlantedBug(give_up_amid_a_read, one_lane(rows=4, moves=2, ahead=1), "does not hold its lane"),
    PlantedBug(forget_what_backs_off, Limits(rows=6, moves=1, saves=1, refusals=1), "only a sweep finds"),
    PlantedBug(forget_what_is_put_back, Limits(rows=2, moves=1, saves=0, refusals=1, put_back=1), "only a sweep finds"),
    PlantedBug(believe_another_database, Limits(rows=2, moves=2, saves=1, late=1, copies=1), "only a sweep finds"),
    PlantedBug(
        save_above_what_is_put_back, Limits(rows=2, moves=2, saves=1, refusals=1, put_back=1), "the saved floor"
    ),
]
SLOW_BUGS = [
    PlantedBug(forget_what_is_left, Limits(rows=2, moves=2, saves=1, left=1), "only a sweep finds"),
    PlantedBug(read_ahead_of_what_has_ended, one_lane(rows=6, moves=1, late=2, ahead=1), "is sent before"),
    PlantedBug(forget_what_runs, Limits(rows=4, moves=2, saves=1, late=1), "the saved floor"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)

    with pytest.raises(AssertionError, match=bug.finds):
        explore(bug.limits)


@pytest.mark.drills
@pytest.mark.parametrize("bug", SLOW_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_bug_planted_deeper_is_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row left to the table, or a transaction that runs, is forgotten; the search finds a course that it breaks."""
    bug.plant(monkeypatch)

    with pytest.raises(AssertionError, match=bug.finds):
        explore(bug.limits)
