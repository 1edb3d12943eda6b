"""Small charts as SVG, drawn here: they need no script, and no page of another site."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

WIDTH, HEIGHT = 300, 56
TOP, BOTTOM = 4, HEIGHT - 1  # where the highest value and 0 are drawn
MOST = 120  # points of a curve: more than its width can show
COUNTS = tuple(digit * 10**power for power in range(12) for digit in (1, 2, 5))
SECONDS = (
    *(digit * 10**power for power in (-3, -2, -1) for digit in (1, 2, 5)),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200),
    *(hours * 3600 for hours in (6, 12, 24, 48, 120, 240, 480, 1200, 2400)),
)

Value = tuple[float, float | None]  # when, and what; None: it was not known


@dataclass(frozen=True, slots=True)
class Chart:
    """A curve and the area below it, as paths; where a value was not known they have a gap.

    Attributes:
        top: the value at the upper end of the axis; None where all values are 0.
        points: how many seconds before the end each value was, and what it was; None for a gap.
    """

    line: str
    area: str
    highest: float
    top: float | None
    points: tuple[Value, ...]


def chart(
    values: Sequence[Value],
    *,
    since: float,
    until: float,
    steps: Sequence[float] = COUNTS,
    longest: float = math.inf,
) -> Chart | None:
    """Return the chart of values by time; None where no value is known.

    Args:
        steps: values that an axis may end with.
        longest: seconds that a value counts for at most; nobody looked where the next one comes later.
    """
    thinned = list(_thinned(list(_with_gaps(values, longest)), (until - since) / MOST))
    known = [value for _, value in thinned if value is not None]
    if not known or until <= since:
        return None
    highest = max(known)
    top = next((step for step in steps if step >= highest), highest) if highest > 0 else None
    scale = (BOTTOM - TOP) / top if top else 0.0
    runs = [
        [(WIDTH * (at - since) / (until - since), BOTTOM - (value or 0.0) * scale) for at, value in run]
        for is_known, run in groupby(thinned, key=lambda each: each[1] is not None)
        if is_known
    ]
    return Chart(
        "".join(map(_line, runs)),
        "".join(f"{_line(run)}L{run[-1][0]:.1f} {HEIGHT}L{run[0][0]:.1f} {HEIGHT}Z" for run in runs),
        highest,
        top,
        tuple((until - at, value) for at, value in thinned),
    )


def _with_gaps(values: Sequence[Value], longest: float) -> Iterator[Value]:
    for value, (next_at, _) in pairwise([*values, *values[-1:]]):
        yield value
        if next_at - value[0] > longest:
            yield (value[0] + next_at) / 2, None


def _line(run: Sequence[tuple[float, float]]) -> str:
    points = run if len(run) > 1 else [*run, *run]  # a line of no length is a dot
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _thinned(values: Sequence[Value], width: float) -> Iterator[Value]:
    """Yield the highest value of each so many seconds; a gap in them stays one."""
    bucket: Callable[[Value], int] = lambda each: int(each[0] // width)  # noqa: E731
    for _, same in groupby(values, key=bucket):
        found = list(same)
        known = [value for _, value in found if value is not None]
        yield found[-1][0], max(known) if len(known) == len(found) else None
