"""Rows that go out again after a while."""

import asyncio
import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from relay.engine.row import Row


class Waiting(NamedTuple):
    """A row, ordered by when it is due."""

    at: float  # loop time
    tie: int
    row: Row
    passed: bool  # its key has gone on without it


class Later:
    """Gives rows back when their time has come.

    Args:
        due: takes the rows that hold their key, and those whose key has gone on without them.
    """

    def __init__(self, due: Callable[[list[Row], list[Row]], None]) -> None:
        self._due = due
        self._heap: list[Waiting] = []
        self._tie = count()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __iter__(self) -> Iterator[Row]:
        return (waiting.row for waiting in self._heap)

    def push(self, seconds: float, row: Row, *, passed: bool = False) -> None:
        heapq.heappush(self._heap, Waiting(self._loop.time() + seconds, next(self._tie), row, passed))
        self._arm()

    def withdraw(self, matches: Callable[[Row], bool], *, passed: bool) -> list[Row]:
        """Take out the rows that match, of those whose key has gone on or of the others."""
        found = [waiting for waiting in self._heap if waiting.passed is passed and matches(waiting.row)]
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
        holding: list[Row] = []
        passed: list[Row] = []
        while self._heap and self._heap[0].at <= now:
            waiting = heapq.heappop(self._heap)
            (passed if waiting.passed else holding).append(waiting.row._replace(backoff_ms=0))
        self._timer = None
        self._arm()
        self._due(holding, passed)
