"""Each combination of `ordering` and `key_policy` holds back what its cell of the truth table says, and no more."""

import re
from dataclasses import astuple
from itertools import product
from pathlib import Path

import pytest

from relay.config.settings import KeyPolicy, Ordering
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.tail import BackingOff
from relay.engine.row import Outcome, Settled
from tests.engine.recording_wire import attached
from tests.engine.rows import rows

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0029-one-delivery-policy.md"

CELLS = {
    (Ordering.KEY, KeyPolicy.HOLD): DeliveryPolicy(one_at_a_time=True, backoff_holds_key=True, put_away_holds_key=True),
    (Ordering.KEY, KeyPolicy.SKIP): DeliveryPolicy(
        one_at_a_time=True, backoff_holds_key=False, put_away_holds_key=False
    ),
    (Ordering.PIPELINED, KeyPolicy.HOLD): DeliveryPolicy(
        one_at_a_time=False, backoff_holds_key=False, put_away_holds_key=True
    ),
    (Ordering.PIPELINED, KeyPolicy.SKIP): DeliveryPolicy(
        one_at_a_time=False, backoff_holds_key=False, put_away_holds_key=False
    ),
}
EACH = pytest.mark.parametrize(("ordering", "key_policy"), list(product(Ordering, KeyPolicy)))


@EACH
def test_the_policy_is_that_of_the_truth_table(ordering: Ordering, key_policy: KeyPolicy) -> None:
    assert DeliveryPolicy.of(ordering, key_policy) == CELLS[ordering, key_policy]


def test_the_documented_truth_table_is_the_same() -> None:
    lines = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \| (yes|no) \| (yes|no) \|$", PAGE.read_text(), re.MULTILINE
    )

    documented = {(ordering, key_policy): [cell == "yes" for cell in cells] for ordering, key_policy, *cells in lines}
    assert documented == {cell: list(astuple(policy)) for cell, policy in CELLS.items()}


@EACH
async def test_a_key_has_several_rows_in_flight_unless_one_goes_at_a_time(
    ordering: Ordering, key_policy: KeyPolicy
) -> None:
    sender, wire = attached(ordering=ordering, key_policy=key_policy)
    first, second = rows([1, 1])

    sender.offer([first, second])

    assert (second in wire.open) is not CELLS[ordering, key_policy].one_at_a_time


@EACH
async def test_a_row_that_backs_off_takes_its_followers_along_and_may_hold_its_key(
    ordering: Ordering, key_policy: KeyPolicy
) -> None:
    sender, wire = attached(ordering=ordering, key_policy=key_policy)
    first, second, third = rows([1, 1, 1])
    sender.offer([first, second])
    sender.settle(Settled((first,), Outcome.REFUSED, "because"))
    waits = BackingOff(DeliveryPolicy.of(ordering, key_policy))

    followers = sender.queue.put_off(first)
    waits.add(first, 10.0, followers)
    _, free = waits.split([third], 0.0)

    holds = CELLS[ordering, key_policy].backoff_holds_key
    assert followers == ([second] if holds else [])
    assert (second in wire.open) is not holds
    assert free == ([] if holds else [third])
