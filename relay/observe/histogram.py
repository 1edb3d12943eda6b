"""A histogram for the event loop: an observation costs a search in a list, without a lock or a new object."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by upper bound.

    Args:
        bounds: ascending; values above the last count as infinite.
    Attributes:
        total: sum of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def add(self, other: "Histogram") -> None:
        """Add the counts of another histogram with the same bounds."""
        self._counts = [ours + theirs for ours, theirs in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    def buckets(self) -> list[tuple[float, int]]:
        """Return each bound with the number of values up to it; the last bound is infinity, and counts all values."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True))
