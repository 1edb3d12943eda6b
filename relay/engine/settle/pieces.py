"""Divide rows that a statement moves to another partition, so that it moves them in its time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from relay.engine.row import Fault, Row

Given = TypeVar("Given", Row, Fault)

# Of rows that one statement moves. One by one, 20,000 rows that a writer got wrong kept the rows of others waiting for
# half a minute. But a row may have a gigabyte that was never read, and moving it takes its time.
ROWS_PER_MOVE, BYTES_PER_MOVE = 500, 16 * 1024 * 1024


def pieces(given: Sequence[Given], costs: Iterable[int]) -> Iterator[Sequence[Given]]:
    """Divide what is to be moved, of which each costs so many bytes."""
    start = size = 0
    for end, cost in enumerate(costs):
        if end > start and (end - start == ROWS_PER_MOVE or size + cost > BYTES_PER_MOVE):
            yield given[start:end]
            start, size = end, 0
        size += cost
    if given:
        yield given[start:]
