"""Send letters back in stages: after so many a job waits, and counts the letters that fail again.

The broker does not tell what a consumer did with a letter. But a letter that is given up again comes into the queue of
dead letters, whose length tells how many came. A stage waits twice as long as the tries of its letters took the last
time: they tell when they failed first and last.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relay.consume.failed.queues import partition_queue_names
from relay.errors import NotFoundError
from relay.operate.letters.letter import Held
from relay.operate.letters.queue import DeadQueue

MARGIN = 5.0  # seconds that a stage waits in addition
LONGEST = 300.0  # seconds that it waits for one thing: a letter can say anything
LOOK_INTERVAL = 0.5  # seconds


class Save(Protocol):
    """Commits where a stage stands.

    Args:
        expected: letters that are done, or would be in the queue if no more had come since the stage began.
        came: letters that came in it; told when it ends.
        because: why the job is paused.

    Raises:
        JobTurnedError: an operator has paused or cancelled the job.
    """

    def __call__(
        self, *, expected: int, came: int = 0, has_ended: bool = False, because: str | None = None
    ) -> None: ...


def save_nothing(**_: object) -> None:
    """Commit nothing: there are no stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the stages of a job stood when this run of it began.

    Attributes:
        ends: after how many letters in all each stage ends that is left; after the last come all the others.
        most: the share of a stage that may fail; None: any.
        done: letters in all.
        begun: of these, letters of earlier stages.
        expected: as `Save` has it.
    """

    ends: Sequence[int] = ()
    most: float | None = None
    done: int = 0
    begun: int = 0
    expected: int = 0


@dataclass(slots=True)
class _Stage:
    """The letters of one stage.

    Attributes:
        took: seconds from the first failure to the last, for each key: its letters may be tried one after the other.
        undelivered: queues that they went into, and that had letters whenever we looked.
    """

    size: int = 0
    refused: int = 0
    took: dict[object, float] = field(default_factory=lambda: defaultdict(float))
    undelivered: set[str] = field(default_factory=set)

    @property
    def wait(self) -> float:
        """Seconds after its letters were delivered; twice what they took, as the times between tries are drawn."""
        return min(2 * max(self.took.values(), default=0.0), LONGEST) + MARGIN


class Stages:
    """What is left of the stages of a job, and the letters of the one that it is in.

    Attributes:
        failed: letters that came into the queue in the stages that have ended.
        has_paused: whether a stage has paused the job.
    """

    def __init__(self, standing: Standing = Standing(), save: Save = save_nothing) -> None:
        self.failed = 0
        self.has_paused = False
        self._ends = list(standing.ends)
        self._most = standing.most
        self._tried = standing.done  # letters in all
        self._expected = standing.expected
        self._save = save
        self._earlier = 0  # letters that came in the stage before this run, without those of stages that have ended
        self._stage = _Stage(size=max(0, standing.done - standing.begun))

    async def begin(self, queue: DeadQueue, consumed: str | None) -> None:
        """Count the letters that came since a stage was interrupted, if it was."""
        if self.is_over or consumed is None:
            return
        seen = queue.count + self._tried
        if self._stage.size:
            self._earlier = seen - self._expected
            self._stage.took[None] = LONGEST  # its letters are not here to tell
            self._stage.undelivered = await _queues_of(consumed, queue)
        else:
            self._expected = seen
            await asyncio.to_thread(self._save, expected=seen)

    async def has_consumer(self, queue: DeadQueue, consumed: str | None) -> bool:
        """Whether a process consumes what a stage would send; else its outcome is not known before one does."""
        if self.is_over or consumed is None:
            return True
        for each in sorted(await _queues_of(consumed, queue)):
            if await queue.consumers(each):
                return True
        return False

    def room(self, wanted: int) -> int:
        """Return how many of so many letters belong to this stage."""
        return min(wanted, self._ends[0] - self._tried) if self._ends else wanted

    @property
    def is_over(self) -> bool:
        return not self._ends

    @property
    def is_full(self) -> bool:
        return bool(self._ends) and self._tried >= self._ends[0]

    @property
    def is_under_way(self) -> bool:
        """Whether a stage has letters whose outcome is not known."""
        return bool(self._ends and self._stage.size)

    def note(self, letters: Collection[Held], targets: Mapping[Held, str], refused: Collection[Held]) -> None:
        """Take letters into the stage, which were sent into their queues unless the broker has refused them."""
        stage = self._stage
        self._tried += len(letters)
        stage.size += len(letters)
        stage.refused += len(refused)
        for each, queue in targets.items():
            if each not in refused:
                first, last = each.letter.first_failed_at, each.letter.last_failed_at
                took = (last - first).total_seconds() if first and last else 0.0
                stage.took[each.letter.key or each] += max(0.0, took)
                stage.undelivered.add(queue)

    async def outcome(self, queue: DeadQueue, *, goes_on: Callable[[], Awaitable[bool]]) -> str | None:
        """End the stage when its outcome is known; return why the job is paused.

        Args:
            goes_on: asked now and then; the stage stays as it is once the job is to stop.
        """
        clock, stage = asyncio.get_running_loop().time, self._stage
        began, came = clock(), 0
        until: float | None = None  # from when on its outcome counts
        while True:
            seen = await queue.came() + self._earlier
            came = max(came, seen)
            if because := self._too_many(came):
                break
            if until is not None and clock() >= until and seen == came:
                break
            if clock() > (until or began) + LONGEST:
                return await self._give_up(queue.name, is_delivered=until is not None)
            if not await goes_on():
                return None
            # A queue is first in, first out: once it was empty, our letters have been delivered.
            stage.undelivered = {each for each in stage.undelivered if await queue.waiting(each)}
            if until is None and not stage.undelivered:
                until = clock() + stage.wait
            await asyncio.sleep(LOOK_INTERVAL)
        self._expected += came
        await self._commit(came=came, has_ended=True, because=because)
        self._earlier -= came
        self.failed += came
        self._ends.pop(0)
        self._stage = _Stage()
        return because

    async def _give_up(self, dead: str, *, is_delivered: bool) -> str:
        """Pause in the stage, whose outcome cannot be known."""
        because = f"others took letters out of {dead}: a stage cannot count in it"
        if not is_delivered:
            queues = ", ".join(sorted(self._stage.undelivered))
            because = f"{queues} was never empty in {LONGEST:.0f} s: see to its consumers"
        await self._commit(because=because)
        return because

    async def _commit(self, *, came: int = 0, has_ended: bool = False, because: str | None) -> None:
        self.has_paused = because is not None
        expected = self._expected
        await asyncio.to_thread(self._save, expected=expected, came=came, has_ended=has_ended, because=because)

    def _too_many(self, came: int) -> str | None:
        failing, size = came + self._stage.refused, max(self._stage.size, 1)
        if self._most is None or failing / size <= self._most:
            return None
        of = f"letters that failed while a stage of {size} was tried: {failing}"
        return f"{of}, or {failing / size:.0%}, and at most {self._most:.0%} may"


async def _queues_of(consumed: str, queue: DeadQueue) -> set[str]:
    """Return the queue that is consumed, or those of its pool."""
    try:
        await queue.waiting(consumed)
    except NotFoundError:
        return {*partition_queue_names(consumed)}
    return {consumed}
