"""Rows that go out again after a while."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from relay.engine.row import Row


class DueRow(NamedTuple):
    """A row, ordered by when it is due."""

    at: float  # loop time
    tie: int
    row: Row


class ResendTimer:
    """Holds rows, and passes them to `due` when their time has come."""

    def __init__(self, due: Callable[[list[Row]], None]) -> None:
        self._due = due
        self._heap: list[DueRow] = []
        self._tie = count()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, seconds: float, row: Row) -> None:
        heapq.heappush(self._heap, DueRow(self._loop.time() + seconds, next(self._tie), row))
        self._arm()

    def withdraw(self, matches: Callable[[Row], bool]) -> list[Row]:
        """Remove and return the rows that match."""
        found = [waiting for waiting in self._heap if matches(waiting.row)]
        if found:
            ties = {waiting.tie for waiting in found}
            self._heap = [waiting for waiting in self._heap if waiting.tie not in ties]
            heapq.heapify(self._heap)
            self._arm()
        return [waiting.row for waiting in found]

    def clear(self) -> None:
        self._heap.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._heap[0].at, self._give) if self._heap else None

    def _give(self) -> None:
        now = self._loop.time()
        rows: list[Row] = []
        while self._heap and self._heap[0].at <= now:
            rows.append(heapq.heappop(self._heap).row)
        self._timer = None
        self._arm()
        self._due(rows)
