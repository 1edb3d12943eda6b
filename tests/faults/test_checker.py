"""The checker sees each violation when it is planted, and nothing when there is none."""

from collections.abc import Callable
from random import Random
from uuid import UUID, uuid4

import pytest

from tests.faults.checker import Delivered, Fault, Violation, Written, check_deliveries, check_rows, report

KEYS = ("a", "b", "c")


def a_history(length: int = 30) -> list[Written]:
    """Three keys; every fifth message is rolled back, so that its number is used again."""
    history, numbers = [], dict.fromkeys(KEYS, 0)
    for place in range(length):
        key, committed = KEYS[place % 3], place % 5 != 4
        history.append(Written(uuid4(), key, numbers[key] + 1, committed))
        numbers[key] += committed
    return history


def delivered(written: Written) -> Delivered:
    return Delivered(written.message_id, written.key, written.number)


def faithful(history: list[Written]) -> list[Delivered]:
    return [delivered(written) for written in history if written.committed]


def faults(violations: list[Violation]) -> list[Fault]:
    return [violation.fault for violation in violations]


def test_a_faithful_delivery_has_no_violation() -> None:
    history = a_history()

    assert check_deliveries(history, faithful(history)) == []


def test_other_keys_may_overtake() -> None:
    history = a_history()
    by_key = sorted(faithful(history), key=lambda one: one.key)  # stable: in order within each key

    assert check_deliveries(history, by_key) == []


def test_repeats_are_no_violation_wherever_they_come() -> None:
    history = a_history()
    deliveries = faithful(history)
    repeated = [*deliveries[:10], *deliveries[3:10], *deliveries[10:], *deliveries[:2]]

    assert check_deliveries(history, repeated) == []


def drop_one(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    return deliveries[:7] + deliveries[8:]


def drop_the_last(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    return deliveries[:-1]


def deliver_rolled_back(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    ghost = next(written for written in history if not written.committed)
    return [*deliveries, delivered(ghost)]


def deliver_unknown(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    return [*deliveries, Delivered(UUID(int=7), "a", 1)]


def swap_within_a_key(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    first, second = [place for place, one in enumerate(deliveries) if one.key == "b"][2:4]
    deliveries[first], deliveries[second] = deliveries[second], deliveries[first]
    return deliveries


def deliver_late_but_repeat_early(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    """The repeat stands in order; the first occurrence does not."""
    places = [place for place, one in enumerate(deliveries) if one.key == "c"]
    return [deliveries[places[1]], *deliveries]


def change_the_key(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    deliveries[4] = Delivered(deliveries[4].message_id, "other", deliveries[4].number)
    return deliveries


def change_a_repeat(history: list[Written], deliveries: list[Delivered]) -> list[Delivered]:
    return [*deliveries, Delivered(deliveries[4].message_id, deliveries[4].key, 999)]


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (drop_one, Fault.LOST),
        (drop_the_last, Fault.LOST),
        (deliver_rolled_back, Fault.INVENTED),
        (deliver_unknown, Fault.INVENTED),
        (swap_within_a_key, Fault.REORDERED),
        (deliver_late_but_repeat_early, Fault.REORDERED),
        (change_the_key, Fault.CHANGED),
        (change_a_repeat, Fault.CHANGED),
    ],
)
def test_a_planted_violation_is_reported_and_no_other(
    plant: Callable[[list[Written], list[Delivered]], list[Delivered]], fault: Fault
) -> None:
    history = a_history()

    assert faults(check_deliveries(history, plant(history, faithful(history)))) == [fault]


def test_every_message_out_of_order_is_reported() -> None:
    history = [Written(uuid4(), "a", number, True) for number in range(1, 6)]
    deliveries = faithful(history)[::-1]

    assert faults(check_deliveries(history, deliveries)) == [Fault.REORDERED] * 4


def test_equal_tables_in_any_order_have_no_violation() -> None:
    rows = [(number, "x") for number in range(10)]

    assert check_rows(rows, Random(7).sample(rows, 10)) == []


@pytest.mark.parametrize(
    ("projected", "words"),
    [
        ([(1, "x")], ["(2, 'y') is written, not projected"]),
        ([(1, "x"), (2, "y"), (3, "z")], ["(3, 'z') is projected, not written"]),
        ([(1, "x"), (2, "y"), (2, "y")], ["(2, 'y') is projected, not written"]),
        ([(1, "x"), (2, "n")], ["(2, 'y') is written, not projected", "(2, 'n') is projected, not written"]),
    ],
)
def test_rows_that_differ_are_reported(projected: list[tuple[object, ...]], words: list[str]) -> None:
    violations = check_rows([(1, "x"), (2, "y")], projected)

    assert [violation.what for violation in violations] == words


def test_a_report_counts_all_and_shows_some() -> None:
    violations = [Violation(Fault.LOST, f"number {number}") for number in range(30)]

    lines = report(violations, at_most=3).splitlines()

    assert lines == ["lost 30", "lost: number 0", "lost: number 1", "lost: number 2"]
    assert report([]) == "no violation"
