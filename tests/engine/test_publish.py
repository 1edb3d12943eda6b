"""Order per key holds whatever the outcomes; the wire here is a list, so that each outcome can be chosen."""

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.config.settings import KeyPolicy, Ordering
from relay.engine.row import Outcome, Row, Settled
from tests.engine.recording_wire import attached
from tests.engine.rows import ROW, rows
from tests.support.eventually import eventually


@settings(max_examples=200)
@given(st.data(), st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=40), st.integers(1, 8))
def test_nothing_of_a_key_is_sent_before_its_predecessor_is_settled(
    data: st.DataObject, keys: list[int | None], max_in_flight: int
) -> None:
    async def scenario() -> None:
        sender, wire = attached(max_in_flight=max_in_flight)
        given_rows = rows(keys)
        sender.offer(given_rows)
        confirmed: list[Row] = []
        while wire.open:
            assert len(wire.open) <= max_in_flight
            under_way = [row.key for row in wire.open if row.key is not None]
            assert len(under_way) == len(set(under_way)), "two rows of one key in flight"
            row = wire.open.pop(data.draw(st.integers(0, len(wire.open) - 1)))
            outcome = data.draw(st.sampled_from([Outcome.CONFIRMED, Outcome.CONFIRMED, Outcome.UNKNOWN]))
            sender.settle(Settled((row,), outcome))
            if outcome is Outcome.CONFIRMED:
                confirmed.append(row)
        assert sorted(confirmed) == given_rows
        by_key = defaultdict(list)
        for row in confirmed:
            by_key[row.key].append(row.id)
        for key, ids in by_key.items():
            assert key is None or ids == sorted(ids)

    asyncio.run(scenario())


async def test_an_unknown_outcome_goes_out_again_first_and_says_so() -> None:
    sender, wire = attached(ordering=Ordering.PIPELINED, max_in_flight=4)
    sender.offer(rows([1, 1, 1, 1, 1, 1]))
    lost, wire.open = wire.open, []
    sender.attach(None)

    sender.settle(Settled(lost, Outcome.UNKNOWN, "cut"))
    sender.attach(wire)

    assert [row.id for row in wire.open] == [1, 2, 3, 4]
    assert wire.redelivered == [1, 2, 3, 4]
    assert sender.take_settled() == ([], [])


async def test_a_nack_burns_no_attempt_and_keeps_its_key_in_order() -> None:
    sender, wire = attached()
    first, second, other = rows([1, 1, 2])
    sender.offer([first, second, other])
    assert wire.open == [first, other]

    wire.open.remove(first)
    sender.settle(Settled((first,), Outcome.NACKED))
    assert wire.open == [other]
    await eventually(lambda: first in wire.open, "sent again after the backoff")

    assert second not in wire.open
    assert sender.take_settled() == ([], [])


async def test_a_row_that_is_put_off_takes_its_followers_along() -> None:
    sender, wire = attached()
    first, second, third = rows([1, 1, 1])
    sender.offer([first, second])
    wire.open.clear()
    sender.settle(Settled((first,), Outcome.REFUSED, "406"))
    sender.offer([third])

    assert sender.queue.put_off(first) == [second, third]

    sender.offer([first, second, third])
    assert wire.open == [first]


async def test_with_skip_a_key_passes_a_postponed_row_which_comes_back_in_its_turn() -> None:
    sender, wire = attached(key_policy=KeyPolicy.SKIP)
    first, second, third = rows([1, 1, 1])
    sender.offer([first, second])
    wire.open.clear()
    sender.settle(Settled((first,), Outcome.REFUSED, "406"))

    assert sender.queue.put_off(first) == []
    assert wire.open == [second]

    sender.offer([third, first])
    for _ in range(3):
        sender.settle(Settled((wire.open.pop(),), Outcome.CONFIRMED))
    assert [row.id for row in wire.sent] == [1, 2, 3, 1]


@pytest.mark.parametrize("ordering", Ordering)
async def test_rows_of_a_lane_without_a_backlog_do_not_wait_for_that_of_others(ordering: Ordering) -> None:
    sender, wire = attached(max_in_flight=1, ordering=ordering)
    backlog = rows([1, 2, 3, 4])
    live = [ROW._replace(id=id_, lane=ROW.lane + 1, aggregate_id=b"live") for id_ in (10, 11)]

    sender.offer(backlog)
    sender.offer([*rows([5]), *live], behind={ROW.lane})
    while wire.open:
        sender.settle(Settled((wire.open.pop(0),), Outcome.CONFIRMED))

    ids = [row.id for row in wire.sent]
    by_key = ordering is Ordering.KEY
    assert ids[:4] == ([1, 10, 11, 2] if by_key else [1, 2, 3, 4])


async def test_a_backlog_leaves_room_at_the_broker_while_live_rows_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("relay.engine.send.sender.monotonic", lambda: now)
    sender, wire = attached(max_in_flight=12)
    live = ROW._replace(id=100, lane=ROW.lane + 1, aggregate_id=b"live")

    sender.offer([*rows(range(1, 31)), live], behind={ROW.lane})
    assert [row.id for row in wire.open] == [100, 1, 2, 3]

    now = 1.01
    sender.settle(Settled((wire.open.pop(0),), Outcome.CONFIRMED))
    assert [row.id for row in wire.open] == [*range(1, 13)]


async def test_suspects_go_one_at_a_time_until_each_is_settled() -> None:
    sender, wire = attached()
    suspects = rows([1, 2, 3])
    sender.offer(suspects)
    wire.open.clear()

    sender.settle(Settled(suspects, Outcome.SUSPECT, "404"))

    for row in suspects:
        assert wire.open == [row]
        wire.open.clear()
        sender.settle(Settled((row,), Outcome.REFUSED if row.id == 2 else Outcome.CONFIRMED, "404"))
    confirmed, faulty = sender.take_settled()
    assert [row.id for row in confirmed] == [1, 3]
    assert [fault.row.id for fault in faulty] == [2]


async def test_who_is_suspected_again_when_it_was_alone_is_to_blame() -> None:
    sender, wire = attached()
    suspects = rows([1, 2])
    sender.offer(suspects)

    sender.settle(Settled(suspects, Outcome.SUSPECT, "541"))
    sender.settle(Settled(suspects[:1], Outcome.SUSPECT, "541"))

    assert [fault.row.id for fault in sender.take_settled()[1]] == [1]
    assert [row.id for row in wire.sent] == [1, 2, 1, 2]


async def test_what_was_confirmed_but_not_marked_is_not_sent_again() -> None:
    sender, wire = attached()
    first, second = rows([1, 2])
    sender.offer([first, second])
    wire.open.clear()
    sender.settle(Settled((first,), Outcome.CONFIRMED))
    sender.settle(Settled((second,), Outcome.UNKNOWN))
    wire.open.clear()
    sender.settle(Settled((second,), Outcome.UNKNOWN))
    wire.open.clear()
    sender.settle(Settled((second,), Outcome.NACKED))

    await sender.abandon()
    sender.offer([first, second])

    assert sender.take_settled() == ([first], [])
    assert wire.open == [second]
