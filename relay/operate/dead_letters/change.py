"""Send dead letters back into the queue that they came from, or throw them away.

A letter is acknowledged last: after the broker has confirmed its copy, and after the audit has its row. Whoever dies in
between leaves the letter where it was, and at most a copy with the same message_id beside it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psycopg

from relay.config.settings import BrokerSettings
from relay.consume.failed.envelope import sent_back
from relay.consume.failed.queues import came_from, dead_queue_name
from relay.database import one_line
from relay.errors import OutboxError, PartlyDoneError
from relay.operate.dead_letters.audit import Entry
from relay.operate.dead_letters.letter import Held, Letter, Selection
from relay.operate.dead_letters.queue import ACKNOWLEDGED_PAGE, PAGE, DeadQueue, opened
from relay.replay.pace import Pace
from relay.stopping import stopped_by_signals

MOST_REFUSED = 10  # in a row: what refuses so many refuses all

Write = Callable[[Sequence[Letter]], None]


@dataclass(slots=True)
class Done:
    """What became of the letters that were meant.

    Attributes:
        chosen: letters that match, as far as they were looked for.
        done: sent back or thrown away; of a dry run, those that would be.
        refused: message ids, each with the reason why it was not sent: these letters are where they were.
        not_found: message ids that were named, and are not there.
        warning: what else an operator should know.
    """

    queue: str
    chosen: int = 0
    done: int = 0
    refused: list[tuple[str | None, str]] = field(default_factory=list)
    not_found: list[str] = field(default_factory=list)
    is_stopped: bool = False
    warning: str | None = None


def queues_of(name: str) -> tuple[str, str]:
    """Give the consumed queue and that of its dead letters, whichever of the two is named."""
    consumed = name.removesuffix(dead_queue_name(""))
    return consumed, dead_queue_name(consumed)


class Change:
    """One command; `run` it once.

    Args:
        write: commits rows of the audit; None: a dry run, which changes nothing.
        rate: letters a second at most; None: as fast as the broker takes them.
        show: called after each page with the letters in the queue, how many were read, and how many refused.
    """

    def __init__(
        self,
        broker: BrokerSettings,
        entry: Entry,
        selection: Selection,
        *,
        write: Write | None,
        rate: float | None = None,
        show: Callable[[int, int, int], None] = lambda *_: None,
    ) -> None:
        self._broker = broker
        self._entry = entry
        self._selection = selection
        self._write = write
        self._rate = rate
        self._show = show
        self._found: set[str | None] = set()
        self._seen: set[str] = set()  # queues that are there
        self._refused_in_a_row = 0
        self._under_way = 0  # letters that are confirmed or noted, and not known to be acknowledged
        self.done = Done(entry.queue)

    def stop(self) -> None:
        """Begin no more; `run` returns when what is under way is settled."""
        self.done.is_stopped = True

    async def run(self) -> Done:
        """Work through the letters that are there now; what dies anew meanwhile is left.

        Raises:
            OutboxError, psycopg.Error: nothing was done.
            PartlyDoneError: it could not go on; what is done stays done.
        """
        done = self.done
        try:
            async with opened(self._broker, self._entry.queue) as queue:
                await self._work(queue)
            done.warning = queue.refusal
        except (psycopg.Error, OutboxError) as error:
            if not done.done + self._under_way:
                raise
            more = f", {self._under_way} more may be and may still be there," if self._under_way else ""
            raise PartlyDoneError(
                f"{done.done} letters of {done.queue} are done{more} and the others stay: {one_line(error)}"
            ) from error
        if not done.is_stopped and self._is_wanting:
            done.not_found = sorted(self._selection.message_ids - self._found)
        return done

    async def run_until_told(self) -> Done:
        """Do as `run`, until SIGTERM or SIGINT; a second signal stops at once, and loses nothing."""
        running = asyncio.create_task(self.run(), name="dead-letters")
        with stopped_by_signals(self.stop, running):
            try:
                return await running
            except asyncio.CancelledError:
                return self.done

    @property
    def _is_wanting(self) -> bool:
        """Tell whether more letters are wanted."""
        return self._selection.limit is None or self.done.chosen < self._selection.limit

    async def _work(self, queue: DeadQueue) -> None:
        pace = None if self._rate is None or self._write is None else Pace(self._rate)
        selection = self._selection
        is_whole = selection.is_everything and selection.limit is None and pace is None
        async for page in queue.pages(PAGE if is_whole else ACKNOWLEDGED_PAGE):
            chosen = self._choose(page)
            while chosen and not self.done.is_stopped:
                count = len(chosen) if pace is None else await pace.room(len(chosen))
                await self._settle(queue, chosen[:count])
                chosen = chosen[count:]
            self._show(queue.count, queue.read, len(self.done.refused))
            if self.done.is_stopped or not self._is_wanting:
                return

    def _choose(self, page: Sequence[Held]) -> list[Held]:
        done, limit = self.done, self._selection.limit
        chosen = [each for each in page if self._selection.matches(each.letter)]
        if limit is not None:
            chosen = chosen[: limit - done.chosen]
        done.chosen += len(chosen)
        self._found.update(each.letter.message_id for each in chosen)
        return chosen

    async def _settle(self, queue: DeadQueue, letters: Sequence[Held]) -> None:
        targets = await self._targets(queue, letters)
        if self._write is None or not letters:
            self.done.done += len(letters)
            return
        await asyncio.to_thread(self._write, [])  # nothing is sent of which no note could be taken
        refusals: list[str | None] = [None] * len(letters)
        if targets:
            copies = (
                (target, sent_back(each.delivered), each.delivered.body)
                for target, each in zip(targets, letters, strict=True)
            )
            refusals = await queue.publish(copies)
        confirmed = [each for each, refusal in zip(letters, refusals, strict=True) if refusal is None]
        self._under_way = len(confirmed)
        await asyncio.to_thread(self._write, [each.letter for each in confirmed])
        await queue.acknowledge(set(confirmed))
        self._under_way = 0
        self.done.done += len(confirmed)
        self._note(letters, refusals)

    async def _targets(self, queue: DeadQueue, letters: Sequence[Held]) -> list[str]:
        """Give the queue that each letter came from, which is there; none when letters are not sent back."""
        if self._entry.sent_to is None:
            return []
        targets = [came_from(each.delivered, self._entry.sent_to) for each in letters]
        for target in sorted({*targets} - self._seen):
            await queue.waiting(target)
            self._seen.add(target)
        return targets

    def _note(self, letters: Sequence[Held], refusals: Sequence[str | None]) -> None:
        for each, refusal in zip(letters, refusals, strict=True):
            if refusal is None:
                self._refused_in_a_row = 0
                continue
            self.done.refused.append((each.letter.message_id, refusal))
            self._refused_in_a_row += 1
        if self._refused_in_a_row >= MOST_REFUSED:
            self.stop()
