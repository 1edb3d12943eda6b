"""What came of a stage of letters that were sent back.

The broker does not tell what a consumer did with a letter. But a letter that is given up again comes into the queue of
dead letters, whose length tells how many came. A stage waits twice as long as the tries of its letters took the last
time: they tell when they failed first and last.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping

from relay.consume.failed.queues import partition_queue_names
from relay.errors import NotFoundError
from relay.jobs.job import Job
from relay.jobs.work import StageOutcome, Stuck, Waits, stage_of
from relay.operate.letters.letter import Held
from relay.operate.letters.queue import DeadQueue

MARGIN = 5.0  # seconds that a stage waits in addition
LONGEST = 300.0  # seconds that it waits for one thing: a letter can say anything
LOOK_INTERVAL = 0.5  # seconds


class Trial:
    """The letters of the stage that a job is in.

    Attributes:
        expected: letters that are done, or would be in the queue if no more had come since the stage began.
        has_begun: whether the job has stages.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.has_begun = False
        self._earlier = 0  # letters that came in the stage before this run, without those of stages that have ended
        self._forget()

    def _forget(self) -> None:
        self._size = 0
        self._refused = 0
        # Seconds from the first failure to the last, for each key: its letters may be tried one after the other.
        self._took: dict[object, float] = defaultdict(float)
        self._undelivered: set[str] = set()  # queues that they went into, and that had letters whenever we looked
        self._came = 0
        self._began: float | None = None  # when we began to look
        self._until: float | None = None  # from when on the outcome counts

    async def begin(self, queue: DeadQueue, consumed: str, job: Job) -> bool:
        """Count the letters that came since a stage was interrupted, if it was.

        Returns:
            Whether a process consumes what a stage would send; else its outcome is not known before one does.
        """
        self.has_begun = True
        seen = queue.count + job.done
        queues = await _queues_of(consumed, queue)
        stage = stage_of(job)
        if stage is not None and job.done > stage.begin:
            self.expected = job.position
            self._size = job.done - stage.begin
            self._earlier = seen - self.expected
            self._took[None] = LONGEST  # its letters are not here to tell
            self._undelivered = queues
        else:
            self.expected = seen
        for each in sorted(queues):
            if await queue.consumers(each):
                return True
        return False

    def note(self, letters: Collection[Held], targets: Mapping[Held, str], refused: Collection[Held]) -> None:
        """Take letters into the stage, which were sent into their queues unless the broker has refused them."""
        self._size += len(letters)
        self._refused += len(refused)
        for each, queue in targets.items():
            if each not in refused:
                first, last = each.letter.first_failed_at, each.letter.last_failed_at
                took = (last - first).total_seconds() if first and last else 0.0
                self._took[each.letter.key or each] += max(0.0, took)
                self._undelivered.add(queue)

    async def look(self, queue: DeadQueue, most: float | None) -> StageOutcome | Waits | Stuck:
        """Return what came of the stage, as soon as it is known.

        Args:
            most: the share that may fail; more of them are known to be too many at once. None: any.
        """
        now = asyncio.get_running_loop().time()
        began = self._began = now if self._began is None else self._began
        seen = await queue.came() + self._earlier
        self._came = max(self._came, seen)
        outcome = self._outcome()
        is_too_much = most is not None and outcome.failing > most * outcome.rows
        is_over = self._until is not None and now >= self._until and seen == self._came
        if is_too_much or is_over:
            return outcome
        if now > (self._until or began) + LONGEST:
            return self._give_up(queue.name)
        # A queue is first in, first out: once it was empty, our letters have been delivered.
        self._undelivered = {each for each in self._undelivered if await queue.waiting(each)}
        if self._until is None and not self._undelivered:
            # Twice what they took, as the times between tries are drawn.
            took = max(self._took.values(), default=0.0)
            self._until = asyncio.get_running_loop().time() + min(2 * took, LONGEST) + MARGIN
        return Waits(LOOK_INTERVAL)

    def end(self) -> None:
        """Begin the next stage."""
        self.expected += self._came
        self._earlier -= self._came
        self._forget()

    def _outcome(self) -> StageOutcome:
        size, failing = max(self._size, 1), self._came + self._refused
        words = f"letters that failed while a stage of {size} was tried: {failing}, or {failing / size:.0%}"
        position = self.expected + self._came
        return StageOutcome(rows=size, failing=failing, failed=self._came, words=words, position=position)

    def _give_up(self, dead: str) -> Stuck:
        if self._until is not None:
            return Stuck(f"others took letters out of {dead}: a stage cannot count in it")
        queues = ", ".join(sorted(self._undelivered))
        return Stuck(f"{queues} was never empty in {LONGEST:.0f} s: see to its consumers")


async def _queues_of(consumed: str, queue: DeadQueue) -> set[str]:
    """Return the queue that is consumed, or those of its pool."""
    try:
        await queue.waiting(consumed)
    except NotFoundError:
        return {*partition_queue_names(consumed)}
    return {consumed}
