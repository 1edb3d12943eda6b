"""A curve shows the values that were known, and a gap where they were not."""

import re

import pytest

from relay.console.charts import COUNTS, MOST, SECONDS, Chart, Value, chart
from relay.console.formats import short

MOVES = re.compile(r"M")


def drawn(values: list[Value], *, seconds: float = 300.0) -> Chart:
    found = chart(values, since=0.0, until=seconds)
    assert found is not None
    return found


def test_a_value_that_was_not_known_is_a_gap() -> None:
    values: list[Value] = [(0, 1), (10, 2), (20, None), (30, None), (40, 3), (50, 4)]

    found = drawn(values, seconds=50)

    assert found.line == "M0.0 44.8L60.0 34.6M240.0 24.4L300.0 14.2"
    assert found.area.count("Z") == 2
    assert found.points[2:4] == ((30, None), (20, None))


def test_a_time_in_which_nobody_looked_is_a_gap() -> None:
    values: list[Value] = [(0, 5), (10, 5), (40, 5), (90, 5), (100, 5)]

    found = chart(values, since=0.0, until=100.0, longest=30.0)
    whole = chart(values, since=0.0, until=100.0)

    assert found is not None
    assert found.line == "M0.0 4.0L30.0 4.0L120.0 4.0M270.0 4.0L300.0 4.0"
    assert whole is not None
    assert whole.line.count("M") == 1


def test_one_value_between_gaps_is_a_dot() -> None:
    found = drawn([(0, None), (100, 5), (200, None)])

    assert found.line == "M100.0 4.0L100.0 4.0"


def test_a_curve_of_zeros_lies_on_the_axis_and_names_no_highest_value() -> None:
    found = drawn([(0, 0), (300, 0)])

    assert (found.line, found.top) == ("M0.0 55.0L300.0 55.0", None)


def test_nothing_is_drawn_where_no_value_is_known() -> None:
    assert chart([(0, None), (10, None)], since=0.0, until=10.0) is None
    assert chart([], since=0.0, until=0.0) is None


def test_a_long_history_keeps_its_peak_and_its_gap() -> None:
    values: list[Value] = [(at, 1.0) for at in range(0, 3600, 10)]
    values[100], values[200] = (1000, 9.0), (2000, None)

    found = drawn(values, seconds=3600)

    assert len(found.points) == MOST
    assert max(value for _, value in found.points if value is not None) == 9
    assert len(MOVES.findall(found.line)) == 2


@pytest.mark.parametrize(
    ("highest", "steps", "top"),
    [(11, COUNTS, 20), (50, COUNTS, 50), (0.3, COUNTS, 1), (1100, SECONDS, 1200), (0.101, SECONDS, 0.2)],
)
def test_an_axis_ends_with_a_round_value(highest: float, steps: tuple[float, ...], top: float) -> None:
    found = chart([(0, highest), (10, 0)], since=0.0, until=10.0, steps=steps)

    assert found is not None
    assert found.top == pytest.approx(top)


@pytest.mark.parametrize(("value", "words"), [(20_000, "20 k"), (12_345, "12.3 k"), (2.5, "2.5"), (2e6, "2 M")])
def test_a_short_number_has_no_needless_digit(value: float, words: str) -> None:
    assert short(value) == words
