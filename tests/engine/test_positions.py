"""The positions alone, over a table in memory: whatever is settled when, no row is left out or under way twice."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from relay.config.settings import RelaySettings
from relay.engine.read.positions import FAR, START_BYTES, Plan, Positions
from relay.engine.row import Row
from relay.engine.session.session import HeldLanes
from tests.engine.rows import ROW

LANES = 3
RUNS = b"5:6:5"  # transaction 5
NOBODY_RUNS = b"9:9:"


def answer(plan: Plan, table: dict[int, Row]) -> list[Row]:
    """Read what a plan asks for, as the statement does."""
    rows: list[Row] = []
    for lane, floor in zip(plan.lanes, plan.floors, strict=True):
        found = [row for id_, row in sorted(table.items()) if row.lane == lane and id_ > floor]
        rows += [row for row in found if row.id not in plan.held][: plan.rows]
    return rows


@settings(max_examples=200)
@given(
    st.data(),
    st.lists(st.integers(0, LANES - 1), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_every_row_is_read_again_if_left_to_the_table_but_never_while_in_flight(
    data: st.DataObject, lanes: list[int], window: int
) -> None:
    held = HeldLanes()
    held.take(range(LANES))
    positions = Positions(held, RelaySettings(max_window_rows=window), now=0.0)
    table = {id_: ROW._replace(id=id_, lane=lane) for id_, lane in enumerate(lanes, start=1)}
    under_way: dict[int, Row] = {}
    sent: list[int] = []
    now = 0.0

    while table:
        while positions.has_room() and positions.has_more:
            plan, now = positions.plan(now), now + 1
            rows = answer(plan, table)
            assert positions.plan_again(plan, NOBODY_RUNS) is None
            positions.end_read()
            for row in positions.take(plan, rows, len(lanes), began=now, ended=now):
                assert row.id not in under_way, "it is read twice"
                under_way[row.id] = row
        assert under_way, "nothing is read any more"
        row = under_way.pop(data.draw(st.sampled_from(sorted(under_way))))
        positions.forget((row,))
        if data.draw(st.sampled_from([False] * 4 + [True]), label="left to the table, as a row whose key waits"):
            positions.reread_from(row.lane, row.id - 1)
        else:
            del table[row.id]
            sent.append(row.id)

    assert sorted(sent) == list(range(1, len(lanes) + 1))
    assert all(positions.is_clear(lane) for lane in range(LANES))


@given(st.integers(1, 50), st.integers(50, 100))
def test_a_read_goes_back_to_where_a_transaction_was_first_seen_when_it_has_ended(first: int, later: int) -> None:
    held = HeldLanes()
    held.take([0])
    positions = Positions(held, RelaySettings(), now=0.0)
    for now, position in enumerate([first, later, later + 10_000], start=1):
        plan = positions.plan(now - 0.5)
        positions.plan_again(plan, RUNS)
        positions.take(plan, [], position, began=now, ended=now)

    plan = positions.plan(10.0)
    longer = positions.plan_again(plan, NOBODY_RUNS)

    assert longer is not None
    assert longer.floors[0] <= first < plan.floors[0]
    assert positions.plan_again(longer, NOBODY_RUNS) is None


@pytest.mark.parametrize(("distance", "is_void"), [(10, False), (10_000, True)])
def test_a_read_ahead_is_void_when_one_that_ran_below_its_floors_has_ended(*, distance: int, is_void: bool) -> None:
    """A transaction of now has its rows above the floors: the read brings them, too."""
    held = HeldLanes()
    held.take([0])
    positions = Positions(held, RelaySettings(), now=0.0)
    for now, position in enumerate([10, 20, 20 + distance], start=1):
        plan = positions.plan(now - 0.5)
        positions.plan_again(plan, RUNS)
        positions.take(plan, [], position, began=now, ended=now)

    ahead = positions.plan_ahead(10.0, [0])

    assert ahead is not None
    assert positions.has_missed(ahead, NOBODY_RUNS) is is_void
    assert not positions.has_missed(ahead, RUNS)


def test_a_floor_ends_where_an_unknown_transaction_may_have_written() -> None:
    held = HeldLanes()
    held.take([0])
    positions = Positions(held, RelaySettings(), now=0.0)
    for now, position in enumerate([10, 20], start=1):
        plan = positions.plan(0.0)
        positions.plan_again(plan, NOBODY_RUNS)
        positions.take(plan, [], position, began=now, ended=now)

    assert [positions.floors(known_until)[0].floor for known_until in (0.5, 1.5, 2.5)] == [0, 10, 20]


def test_a_large_row_that_waits_for_room_keeps_no_other_lane_that_is_far_back() -> None:
    held = HeldLanes()
    held.take([0, 1])
    positions = Positions(held, RelaySettings(max_window_bytes=START_BYTES), now=0.0)
    # Nearly all that may be under way next to a large row.
    stuck = ROW._replace(id=1, lane=1, payload=b"x" * (START_BYTES * 5 // 8))
    large = ROW._replace(id=4 * FAR, lane=0, cost=START_BYTES * 3 // 4, left_out=True)
    for rows in ([], [large, stuck]):
        plan = positions.plan(0.0)
        assert positions.plan_again(plan, NOBODY_RUNS) is None
        positions.take(plan, list(rows), 4 * FAR, began=1.0, ended=1.0)
    for lane in (0, 1):
        positions.reread_from(lane)

    plan = positions.plan(2.0)

    assert positions.has_room()
    assert plan.lanes == [1]
