"""What a kind of bulk work has to bring; the runner brings the rest (relay/jobs/runner.py).

A work is one file. It changes rows or messages, a step at a time, and says what came of a stage. It gets stages, pace,
pause, cancel, progress, and the way back after a kill from the runner.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import psycopg

from relay.jobs.job import Job
from relay.jobs.pace import Pace

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Did:
    """What a step has done.

    Attributes:
        done, failed, released: as of `Job`, of this step alone.
        refused: what was tried and is left as it was; a later run tries it again.
        position: behind which the next step begins.
        selected: rows that the job has in all; None: as before.
    """

    done: int = 0
    failed: int = 0
    released: int = 0
    refused: int = 0
    position: int
    selected: int | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """There is nothing to do for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing is left to do.

    Attributes:
        failed: what stays as it was, and is counted as failed.
    """

    failed: int = 0


@dataclass(frozen=True, slots=True)
class Stuck:
    """It cannot go on without an operator."""

    because: str


Step = Did | Waits | Ended | Stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a stage.

    Attributes:
        rows: that were tried in it.
        failing: of these.
        failed: of these, rows that the job does not yet count as failed.
        words: for an operator, such as "2 of 4 rows of the stage failed".
        position: as of `Did`; None: as it was.
    """

    rows: int
    failing: int
    failed: int
    words: str
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that failed for good, or failed again."""

    id: int
    message_id: str
    reason: str


class Save(Protocol):
    """Writes down how far a job is, on the connection and in the transaction that the work has.

    Attributes:
        job: as far as it is saved.
    """

    job: Job

    async def take_lock(self, connection: psycopg.AsyncConnection) -> None:
        """Let no other process run the job while this connection lives; BusyError when one does.

        The first time it reads the job: another process may have gone on with it.
        """

    async def check(self, connection: psycopg.AsyncConnection) -> None:
        """Lock the job until the transaction ends; JobTurnedError when an operator has paused or cancelled it."""

    async def __call__(
        self,
        connection: psycopg.AsyncConnection,
        news: Did | Outcome,
        *,
        failures: Sequence[Failure] = (),
        has_happened: bool = False,
    ) -> None:
        """Save what the step or the outcome is going to return.

        Args:
            has_happened: it cannot be taken back, so it is counted also when the job was paused or cancelled.
        Raises:
            JobTurnedError: an operator has paused or cancelled the job; the transaction has to be rolled back.
        """


class Work(Protocol):
    """One job's work in this process.

    Attributes:
        pace: how many rows may go.
        most: rows that a step takes at most.
        things, left: what the sentence for a partial end says, as in "3 rows are done, the others stay parked".
        under_way: rows that a step began with, and that a later step counts.
        doubtful: rows that may be done, and are not counted.
        may_be_cut: whether a stop cancels a step; else it is waited for.
    """

    pace: Pace
    most: int
    things: str
    may_be_cut: bool

    @property
    def left(self) -> str: ...

    @property
    def under_way(self) -> int: ...

    @property
    def doubtful(self) -> int: ...

    def opened(self, save: Save) -> AbstractAsyncContextManager[None]:
        """Connect, and take the job's lock on each connection to the database."""

    async def use(self, call: Callable[[psycopg.AsyncConnection], Awaitable[Answer]]) -> Answer:
        """Call with the connection on which the job is saved."""

    async def step(self, room: int, save: Save) -> Step:
        """Change at most `room` rows, and call `save` where the work's own transaction commits."""

    async def settle(self, save: Save, /) -> Did | None:
        """A stop was asked for: finish what is under way, and save it."""

    async def outcome(self, save: Save) -> Outcome | Waits | Stuck:
        """Save what came of a stage, and return it."""
