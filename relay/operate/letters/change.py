"""Send dead letters back into the queue that they came from, or throw them away.

A letter is acknowledged last: after the broker has confirmed its copy, and after the audit has its row. A process that
dies in between leaves the letter where it was, and at most a copy with the same message_id.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import psycopg

from relay.config.settings import BrokerSettings
from relay.consume.failed.envelope import sent_back
from relay.consume.failed.queues import came_from, dead_queue_name
from relay.errors import NotFoundError, OutboxError, PartlyDoneError
from relay.logger import get_logger
from relay.operate.letters.audit import Entry
from relay.operate.letters.letter import Held, Letter, Selection
from relay.operate.letters.queue import ACKNOWLEDGED_PAGE, PAGE, Copy, DeadQueue, opened
from relay.operate.letters.stages import Stages
from relay.operate.sent.pace import Pace
from relay.runtime.stopping import stopped_by_signals
from relay.servers.postgres.database import one_line

log = get_logger(__name__)

MOST_REFUSED = 10  # in a row: what refuses so many refuses all

Write = Callable[[Sequence[Letter]], None]
Show = Callable[[int, int, int], None]  # letters in the queue, how many were read, and how many refused


class Before(Enum):
    """What an earlier run of the job did with a letter."""

    NOTED = auto()  # it is done and counted, and only to be acknowledged
    CAME_BACK = auto()  # it was sent back then, and has failed again: it stays


Known = Callable[[Sequence[Letter]], Mapping[Letter, Before]]


@dataclass(slots=True)
class Done:
    """What became of the letters that were meant.

    Attributes:
        chosen: letters that match, as far as they were looked for.
        done: sent back or thrown away; of a preview, those that would be.
        refused: message ids, each with the reason why it was not sent: these letters are where they were.
        failed_again: letters that came into the queue in the stages of the job.
        not_found: message ids that were named, and are not there.
        warning: what else an operator should know.
        paused_because: why it cannot go on without an operator.
        job: the number of the job; None: a preview.
    """

    queue: str
    chosen: int = 0
    done: int = 0
    refused: list[tuple[str | None, str]] = field(default_factory=list)
    failed_again: int = 0
    not_found: list[str] = field(default_factory=list)
    is_stopped: bool = False
    warning: str | None = None
    paused_because: str | None = None
    job: int | None = None


def queues_of(name: str) -> tuple[str, str]:
    """Return the consumed queue and that of its dead letters, whichever of the two is named."""
    consumed = name.removesuffix(dead_queue_name(""))
    return consumed, dead_queue_name(consumed)


class _Choice:
    """The letters of a queue that a selection means, and the queues that they came from."""

    def __init__(self, entry: Entry, selection: Selection) -> None:
        self.done = Done(entry.queue)
        self.sent_to = entry.sent_to
        self._selection = selection
        self._found: set[str | None] = set()
        self._seen: set[str] = set()  # queues that are there
        self._missing: dict[str, str] = {}  # queues that are not, which letters name

    @property
    def is_whole_queue(self) -> bool:
        return self._selection.is_everything and self._selection.limit is None

    @property
    def is_complete(self) -> bool:
        """Whether as many letters were chosen as the limit allows."""
        return self._selection.limit is not None and self.done.chosen >= self._selection.limit

    def of(self, page: Sequence[Held]) -> list[Held]:
        """Return the letters of a page that match, up to the limit."""
        done, limit = self.done, self._selection.limit
        chosen = [each for each in page if self._selection.matches(each.letter)]
        if limit is not None:
            chosen = chosen[: limit - done.chosen]
        done.chosen += len(chosen)
        self._found.update(each.letter.message_id for each in chosen)
        return chosen

    async def targets(self, queue: DeadQueue, letters: Sequence[Held]) -> tuple[dict[Held, str], dict[Held, str]]:
        """Return the queue that each letter came from, and the letters whose queue is not there, with the reason.

        Both are empty when letters are not sent back. A letter names a partition, and its publisher may have.

        Raises:
            NotFoundError: the consumed queue itself does not exist.
        """
        if self.sent_to is None:
            return {}, {}
        targets = {each: came_from(each.delivered, self.sent_to) for each in letters}
        for target in sorted({*targets.values()} - self._seen - self._missing.keys()):
            try:
                await queue.waiting(target)
            except NotFoundError as error:
                if target == self.sent_to:
                    raise
                self._missing[target] = str(error)
            else:
                self._seen.add(target)
        homeless = {each: self._missing[target] for each, target in targets.items() if target in self._missing}
        return {each: target for each, target in targets.items() if each not in homeless}, homeless

    def name_missing(self) -> None:
        """Note the message ids that were named and were not found. Call it when no page is left."""
        if not self.is_complete:
            self.done.not_found = sorted(self._selection.message_ids - self._found)


class Preview:
    """What a command would do; it changes nothing. `run` it once."""

    def __init__(self, broker: BrokerSettings, entry: Entry, selection: Selection) -> None:
        self._broker = broker
        self._choice = _Choice(entry, selection)

    async def run(self) -> Done:
        """Count the letters that the command would send back or throw away; raises OutboxError."""
        choice, done = self._choice, self._choice.done
        async with opened(self._broker, done.queue) as queue:
            async for page in queue.pages(PAGE if choice.is_whole_queue else ACKNOWLEDGED_PAGE):
                letters = choice.of(page)
                _, homeless = await choice.targets(queue, letters)
                done.done += len(letters) - len(homeless)
                done.refused += [(each.letter.message_id, reason) for each, reason in homeless.items()]
                if choice.is_complete:
                    break
        done.warning = queue.refusal
        choice.name_missing()
        return done


class Command:
    """One command that sends letters back or throws them away; `run` it once.

    Args:
        write: commits rows of the audit.
        known: tells of letters what an earlier run of the same job did.
        rate: letters a second at most; None: as fast as the broker takes them.
        stages: after how many letters it waits for those that fail again.
        show: called after each page.
    """

    def __init__(
        self,
        broker: BrokerSettings,
        entry: Entry,
        selection: Selection,
        *,
        write: Write,
        known: Known = lambda _: {},
        rate: float | None = None,
        stages: Stages | None = None,
        show: Show = lambda *_: None,
    ) -> None:
        self._broker = broker
        self._choice = _Choice(entry, selection)
        self._write = write
        self._known = known
        self._rate = rate
        self._stages = stages or Stages()
        self._show = show
        self._refused_in_a_row = 0
        self._under_way = 0  # letters that are confirmed or noted, and not known to be acknowledged
        self.done = self._choice.done

    def stop(self) -> None:
        """Begin no more; `run` returns when what is under way is settled."""
        self.done.is_stopped = True

    async def run(self) -> Done:
        """Work through the letters that are there now; letters that come meanwhile are left.

        Raises:
            OutboxError, psycopg.Error: nothing was done.
            PartlyDoneError: it could not go on; what is done stays done.
        """
        done = self.done
        try:
            async with opened(self._broker, done.queue) as queue:
                await self._work(queue)
            done.warning = queue.refusal
        except (psycopg.Error, OutboxError) as error:
            if not done.done + self._under_way:
                raise
            more = f", {self._under_way} more may be and may still be there," if self._under_way else ""
            raise PartlyDoneError(
                f"{done.done} letters of {done.queue} are done{more} and the others stay: {one_line(error)}"
            ) from error
        if not done.is_stopped:
            self._choice.name_missing()
        return done

    async def run_until_told(self) -> Done:
        """Do as `run`, until SIGTERM or SIGINT; a second signal stops at once, and loses nothing."""
        running = asyncio.create_task(self.run(), name="dead-letters")
        with stopped_by_signals(lambda _: self.stop(), running):
            try:
                return await running
            except asyncio.CancelledError:
                return self.done

    async def _work(self, queue: DeadQueue) -> None:
        pace = None if self._rate is None else Pace(self._rate)
        if not await self._stages.has_consumer(queue, self._choice.sent_to):
            remedy = "start its consumer: a stage ends when its letters have been consumed"
            log.warning("dead_letters.unconsumed", queue=self._choice.sent_to, remedy=remedy)
        await self._stages.begin(queue, self._choice.sent_to)
        is_whole = self._choice.is_whole_queue and pace is None and self._stages.is_over
        async for page in queue.pages(PAGE if is_whole else ACKNOWLEDGED_PAGE):
            chosen = self._choice.of(page)
            while chosen and not self.done.is_stopped:
                if self._stages.is_full:
                    await self._end_stage(queue)
                    continue
                count = self._stages.room(len(chosen))
                count = count if pace is None else await pace.room(count)
                await self._settle(queue, chosen[:count])
                chosen = chosen[count:]
            self._show(queue.count, queue.read, len(self.done.refused))
            if self.done.is_stopped or self._choice.is_complete:
                break
        if self._stages.is_under_way and not self.done.is_stopped:
            await self._end_stage(queue)

    async def _end_stage(self, queue: DeadQueue) -> None:
        because = await self._stages.outcome(queue, goes_on=self._goes_on)
        if because is not None:
            self._pause(because)

    async def _goes_on(self) -> bool:
        await asyncio.to_thread(self._write, [])  # which fails once an operator has paused or cancelled the job
        return not self.done.is_stopped

    def _pause(self, because: str) -> None:
        self.done.paused_because = because
        self.stop()

    async def _settle(self, queue: DeadQueue, letters: Sequence[Held]) -> None:
        if not letters:
            return
        await asyncio.to_thread(self._write, [])  # nothing is sent of which no note could be taken
        before = await asyncio.to_thread(self._known, [each.letter for each in letters])
        await queue.acknowledge({each for each in letters if before.get(each.letter) is Before.NOTED})
        letters = [each for each in letters if each.letter not in before]
        targets, homeless = await self._choice.targets(queue, letters)
        refused = await queue.publish(Copy(each, to, sent_back(each.delivered)) for each, to in targets.items())
        refused = {**refused, **homeless}
        confirmed = [each for each in letters if each not in refused]
        self._under_way = len(confirmed)
        await asyncio.to_thread(self._write, [each.letter for each in confirmed])
        await queue.acknowledge(set(confirmed))
        self._under_way = 0
        self.done.done += len(confirmed)
        self._stages.note(letters, targets, refused)
        self._note(letters, refused)

    def _note(self, letters: Sequence[Held], refused: Mapping[Held, str]) -> None:
        for each in letters:
            if each in refused:
                self.done.refused.append((each.letter.message_id, refused[each]))
                self._refused_in_a_row += 1
            else:
                self._refused_in_a_row = 0
        if self._refused_in_a_row >= MOST_REFUSED:
            self._pause(f"{len(self.done.refused)} letters were refused, and stay: {self.done.refused[-1][1]}")


async def preview_letters(broker: BrokerSettings, entry: Entry, selection: Selection) -> Done:
    """Count the letters that a command would change; raises OutboxError."""
    return await Preview(broker, entry, selection).run()
