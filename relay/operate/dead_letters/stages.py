"""Send letters back in stages: after so many a job waits, and counts the letters that fail again.

The broker does not tell what a consumer did with a letter. But a letter that is given up again comes into the queue of
dead letters, whose length tells how many came. A stage waits as long as the tries of its letters took the last time:
they tell when they failed first and last.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from relay.operate.dead_letters.letter import Held
from relay.operate.dead_letters.queue import DeadQueue

MARGIN = 5.0  # seconds that a stage waits longer than the tries took the last time
LONGEST = 300.0  # seconds: a letter can say anything, and a broker takes back after 30 minutes what we hold
LOOK_INTERVAL = 0.5  # seconds

Save = Callable[[int, str | None], None]


@dataclass(slots=True)
class _Stage:
    """The letters of one stage, as far as this run has tried them.

    Attributes:
        took: seconds from the first failure to the last, the longest.
        undelivered: queues that they went into, and that had letters whenever we looked.
    """

    size: int = 0
    refused: int = 0
    took: float = 0.0
    undelivered: set[str] = field(default_factory=set)


class Stages:
    """What is left of the stages of a job, and the letters of the one that it is in.

    Args:
        ends: after how many letters in all each stage ends; after the last come all the others.
        most: the share of a stage that may fail; None: any.
        tried: letters of earlier runs.
        save: commits that a stage has ended, with how many letters came back and why the job is paused, if it is.
    """

    def __init__(
        self, ends: Sequence[int] = (), *, most: float | None = None, tried: int = 0, save: Save = lambda *_: None
    ) -> None:
        self._ends = list(ends)
        self._most = most
        self._tried = tried
        self._save = save
        self.came = 0  # letters that came into the queue since we opened it, until the last stage ended
        self._stage = _Stage()

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
        return self.is_full or bool(self._ends and self._stage.size)

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
                stage.took = max(stage.took, min(took, LONGEST))
                stage.undelivered.add(queue)

    async def outcome(self, queue: DeadQueue, *, goes_on: Callable[[], Awaitable[bool]]) -> str | None:
        """End the stage when its outcome is known; return why the job pauses.

        Args:
            goes_on: asked now and then; the stage stays as it is once the job is to stop.
        """
        clock, stage = asyncio.get_running_loop().time, self._stage
        began, came = clock(), 0
        until: float | None = None
        while (because := self._too_many(came)) is None and (until is None or clock() < until):
            if until is None and clock() - began > LONGEST:
                because = f"letters still wait in {', '.join(sorted(stage.undelivered))}: see to its consumers"
                break
            if not await goes_on():
                return None
            # A queue is first in, first out: once it was empty, our letters have been delivered.
            stage.undelivered = {each for each in stage.undelivered if await queue.waiting(each)}
            if until is None and not stage.undelivered:
                until = clock() + stage.took + MARGIN
            await asyncio.sleep(LOOK_INTERVAL)
            came = max(came, await queue.came() - self.came)
        await asyncio.to_thread(self._save, came, because)
        self.came += came
        self._ends.pop(0)
        self._stage = _Stage()
        return because

    def _too_many(self, came: int) -> str | None:
        failing, size = came + self._stage.refused, max(self._stage.size, 1)
        if self._most is None or failing / size <= self._most:
            return None
        of = f"letters that failed while a stage of {size} was tried: {failing}"
        return f"{of}, or {failing / size:.0%}, and at most {self._most:.0%} may"
