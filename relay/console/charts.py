"""Small charts as SVG, drawn here: they need no script, and no page of another site."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 300, 56
ABOVE = 4  # that a line at the top is not cut


@dataclass(frozen=True, slots=True)
class Chart:
    """A line and the area below it, as paths; `highest` is the value at the top."""

    line: str
    area: str
    highest: float


def chart(points: Sequence[tuple[float, float]], *, since: float, until: float) -> Chart | None:
    """Return the chart of values by time; None for fewer than two."""
    if len(points) < 2 or until <= since:
        return None
    highest = max(value for _, value in points)
    scale = (HEIGHT - ABOVE) / highest if highest > 0 else 0.0
    placed = [
        (WIDTH * (at - since) / (until - since), HEIGHT - 1 - value * scale * (HEIGHT - 2) / HEIGHT)
        for at, value in points
    ]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
    area = f"{line}L{placed[-1][0]:.1f} {HEIGHT}L{placed[0][0]:.1f} {HEIGHT}Z"
    return Chart(line, area, highest)
