"""Send dead letters back into the queue that they came from, or throw them away, as a job.

A letter is acknowledged last: after the broker has confirmed its copy, and after the audit has its row. A process that
dies in between leaves the letter where it was, and at most a copy with the same message_id.

The notes of the audit and the job's count are one transaction. A job that was killed before the acknowledgement finds
its letters again, knows them by their notes, and only acknowledges them. So its counts are exact, as far as letters
have a message id.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto

from psycopg.sql import SQL

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume.failed.envelope import sent_back
from relay.consume.failed.queues import came_from, dead_queue_name
from relay.errors import JobTurnedError, NotFoundError, PartlyDoneError, UsageError
from relay.jobs.job import NO_CAUTION, Caution, Job, JobState, Kind, Order, Source, make_job
from relay.jobs.words import done_in_stages
from relay.jobs.work import FULL, Did, Ended, Pace, Save, StageOutcome, Step, Stuck, Waits, stage_of
from relay.logger import get_logger
from relay.operate.letters.audit import READ_NOTES, AuditEntry, storable, which_notes, write_audit
from relay.operate.letters.letter import SOURCE, Held, Letter, LetterSelection
from relay.operate.letters.queue import ACKNOWLEDGED_PAGE, PAGE, Copy, DeadQueue, opened
from relay.operate.letters.read import list_command
from relay.operate.letters.trial import Trial
from relay.operate.session import SessionWork
from relay.servers.postgres.tables import Tables

log = get_logger(__name__)

MOST_REFUSED = 10  # in a row: what refuses so many refuses all
QUEUE, SENT_TO = "queue", "sent_to"  # in the job's filter, next to what selects the letters

Show = Callable[[int, int, int], None]  # letters in the queue, how many were read, and how many refused


@dataclass(slots=True)
class LettersDone:
    """What became of the letters that were meant.

    Attributes:
        chosen: letters that match, as far as they were looked for.
        done: sent back or thrown away; of a preview, those that would be.
        refused: message ids, each with the reason why it was not sent: these letters are where they were.
        failed_again: letters that came into the queue in the stages of the job.
        unwatched: letters that were sent back in no stage: what becomes of them is not known here.
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
    unwatched: int = 0
    not_found: list[str] = field(default_factory=list)
    is_stopped: bool = False
    warning: str | None = None
    paused_because: str | None = None
    job: int | None = None


def queues_of(name: str) -> tuple[str, str]:
    """Return the consumed queue and that of its dead letters, whichever of the two is named."""
    consumed = name.removesuffix(dead_queue_name(""))
    return consumed, dead_queue_name(consumed)


def order_letters(
    tables: Tables,
    entry: AuditEntry,
    selection: LetterSelection,
    *,
    caution: Caution = NO_CAUTION,
    by_console: bool = False,
) -> Job:
    """Write down a job over the letters of a queue; `LettersWork` does it. Letters are counted when they are named."""
    order = Order(
        kind=Kind(entry.command),
        source=Source.DEAD_LETTER,
        filter={QUEUE: entry.queue, SENT_TO: entry.sent_to, **selection.as_json()},
        by=entry.done_by,
        why=entry.why,
        selected=len(selection.message_ids) or None,
        caution=caution,
        by_console=by_console,
    )
    return make_job(tables, order)


COUNT_RETRIED = SQL("""
    INSERT INTO {schema}.failure AS known (id, source, cause, event_type, place, retried)
    SELECT id, %(source)s, cause, event_type, %(place)s, count(*)
    FROM unnest(%(ids)s::text[], %(causes)s::text[], %(types)s::text[]) AS letter (id, cause, event_type)
    GROUP BY id, cause, event_type
    ON CONFLICT (id) DO UPDATE SET retried = known.retried + EXCLUDED.retried
""")


def done_by_console(job: Job) -> LettersDone:
    """Return what a console has done with letters.

    Raises:
        PartlyDoneError: some are left, or the job has not ended.
    """
    queue = entry_of(job).queue
    if job.state is not JobState.DONE:
        because = f": {job.paused_because}" if job.paused_because else ""
        raise PartlyDoneError(f"{job.words} is {job.state} after {job.done} letters of {queue}{because}")
    if left := (job.selected or 0) - job.done:
        raise PartlyDoneError(
            f"{job.done} letters of {queue} are done, and {left} stay or are not there: see {list_command(queue)}"
        )
    unwatched = _unwatched(job)
    return LettersDone(queue, chosen=job.done, done=job.done, failed_again=job.failed, unwatched=unwatched, job=job.id)


def _unwatched(job: Job) -> int:
    return job.done - done_in_stages(job) if job.kind is Kind.RETRY else 0


def entry_of(job: Job) -> AuditEntry:
    """Return what the notes of a job's letters have in common.

    Raises:
        UsageError: its queue has no dead letters, or it would send them elsewhere than where they came from. Who may
            write jobs could else let a console empty any queue.
    """
    queue, sent_to = job.filter.get(QUEUE), job.filter.get(SENT_TO)
    consumed, dead = queues_of(str(queue))
    if queue != dead or sent_to != (consumed if job.kind is Kind.RETRY else None):
        raise UsageError(f"{job.words} is over the queue {queue!r}, into {sent_to!r}: no command orders such a job")
    return AuditEntry(job.kind, dead, sent_to, job.done_by, job.why or "", job.id)


class _Choice:
    """The letters of a queue that a selection means, and the queues that they came from."""

    def __init__(self, entry: AuditEntry, selection: LetterSelection) -> None:
        self.done = LettersDone(entry.queue)
        self.sent_to = entry.sent_to
        self._selection = selection
        self._found: set[str | None] = set()
        self._seen: set[str] = set()  # queues that are there
        self._missing: dict[str, str] = {}  # queues that are not, which letters name

    def leave_out(self, done: int) -> None:
        """Choose so many letters less: earlier runs have done them."""
        if self._selection.limit is not None:
            self._selection = replace(self._selection, limit=self._selection.limit - done)

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


async def preview_letters(broker: BrokerSettings, entry: AuditEntry, selection: LetterSelection) -> LettersDone:
    """Count the letters that a command would send back or throw away; nothing is changed. Raises OutboxError."""
    choice = _Choice(entry, selection)
    done = choice.done
    async with opened(broker, done.queue) as queue:
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


class Before(Enum):
    """What an earlier run of the job did with a letter."""

    NOTED = auto()  # it is done and counted, and only to be acknowledged
    CAME_BACK = auto()  # it was sent back then, and has failed again: it stays


class LettersWork(SessionWork):
    """A job over the letters of a queue that are there now; letters that come meanwhile are left.

    See `relay.jobs.work.Work`.

    Attributes:
        doubtful: letters that are confirmed or noted, and not known to be acknowledged.

    Args:
        show: called after each page.
    """

    def __init__(
        self, database: DatabaseSettings, broker: BrokerSettings, job: Job, *, show: Show = lambda *_: None
    ) -> None:
        super().__init__(database, timeout=database.command_timeout)
        self.entry = entry_of(job)
        self.things = f"letters of {self.entry.queue}"
        self.pace = Pace(job.rate or FULL)
        self.doubtful = 0
        self._broker = broker
        self._show = show
        selection = LetterSelection.from_json(job.filter)
        is_whole = selection.is_everything and selection.limit is None and job.rate is None and not job.stages
        self.most = PAGE if is_whole else ACKNOWLEDGED_PAGE
        self._choice = _Choice(self.entry, selection)
        self._trial = Trial()
        self._chosen: list[Held] = []  # of the page, and not settled
        self._refused_in_a_row = 0
        self._queue: DeadQueue
        self._pages: AsyncIterator[list[Held]]

    @property
    def left(self) -> str:
        doubtful = f"{self.doubtful} more may be and may still be there, " if self.doubtful else ""
        return f"{doubtful}and the others stay"

    def result(self, job: Job) -> LettersDone:
        """Return what became of the letters of this run; `job` as it is behind it.

        Raises:
            PartlyDoneError: an operator has cancelled the job.
        """
        if job.state is JobState.CANCELLED:
            return done_by_console(job)
        done = self._choice.done
        done.job = job.id
        done.is_stopped = job.state is not JobState.DONE
        done.paused_because = job.paused_because
        done.unwatched = _unwatched(job)
        done.failed_again = job.failed - (0 if done.is_stopped else len(done.refused))
        return done

    @asynccontextmanager
    async def opened(self, save: Save) -> AsyncIterator[None]:
        async with super().opened(save):
            self._choice.leave_out(save.job.done)
            async with opened(self._broker, self.entry.queue) as self._queue:
                await self._begin(save)
                self._pages = self._queue.pages(self.most)
                yield
            self._choice.done.warning = self._queue.refusal

    async def step(self, room: int, save: Save) -> Step:
        if self._refused_in_a_row >= MOST_REFUSED:
            refused = self._choice.done.refused
            return Stuck(f"{len(refused)} letters were refused, and stay: {refused[-1][1]}")
        if not self._chosen:
            page = None if self._choice.is_complete else await anext(self._pages, None)
            self._show(self._queue.count, self._queue.read, len(self._choice.done.refused))
            if page is None:
                return await self._end(save.job)
            self._chosen = self._choice.of(page)
            if not self._chosen:
                did = Did(position=self._position(save.job), scanned=self._queue.read)
                await save(self._connection, did)
                return did
        letters, self._chosen = self._chosen[:room], self._chosen[room:]
        return await self._settle(letters, save)

    async def outcome(self, save: Save) -> StageOutcome | Waits | Stuck:
        found = await self._trial.look(self._queue, save.job.stop_when_failing)
        if isinstance(found, StageOutcome):
            await save(self._connection, found)
            self._trial.end()
        return found

    async def _begin(self, save: Save) -> None:
        consumed = self.entry.sent_to
        is_tried = stage_of(save.job) is not None and consumed is not None
        if is_tried and not await self._trial.begin(self._queue, str(consumed), save.job):
            remedy = "start its consumer: a stage ends when its letters have been consumed"
            log.warning("dead_letters.unconsumed", queue=consumed, remedy=remedy)
        did = Did(position=self._position(save.job), scanned=0, to_scan=self._queue.count)
        try:
            await save(self._connection, did)
        except JobTurnedError:
            save.job = await save.read(self._connection)
        else:
            save.job = save.with_news(did)

    def _position(self, job: Job) -> int:
        return self._trial.expected if self._trial.has_begun else job.position

    async def _settle(self, letters: Sequence[Held], save: Save) -> Did:
        queue, connection = self._queue, self._connection
        async with connection.transaction():
            await save.check(connection)
            await write_audit(connection, self._schema, self.entry, [])  # nothing is sent that could not be noted
        before = await self._known(save.job, [each.letter for each in letters])
        await queue.acknowledge({each for each in letters if before.get(each.letter) is Before.NOTED})
        letters = [each for each in letters if each.letter not in before]
        targets, homeless = await self._choice.targets(queue, letters)
        refused = await queue.publish(Copy(each, to, sent_back(each.delivered)) for each, to in targets.items())
        refused = {**refused, **homeless}
        confirmed = [each for each in letters if each not in refused]
        self.doubtful = len(confirmed)
        position = self._position(save.job)
        did = Did(done=len(confirmed), refused=len(refused), position=position, scanned=queue.read)
        async with connection.transaction():
            await write_audit(connection, self._schema, self.entry, [each.letter for each in confirmed])
            if save.job.kind is Kind.RETRY:
                await self._count_retried([each.letter for each in confirmed])
            await save(connection, did, has_happened=True)
        await queue.acknowledge(set(confirmed))
        self.doubtful = 0
        self._choice.done.done += len(confirmed)
        self._trial.note(letters, targets, refused)
        self._note(letters, refused)
        return did

    def _note(self, letters: Sequence[Held], refused: Mapping[Held, str]) -> None:
        for each in letters:
            if each in refused:
                self._choice.done.refused.append((each.letter.message_id, refused[each]))
                self._refused_in_a_row += 1
            else:
                self._refused_in_a_row = 0

    async def _end(self, job: Job) -> Ended:
        """Note the message ids that were named, are not there, and were not done by an earlier run."""
        self._choice.name_missing()
        done = self._choice.done
        if done.not_found and job.done:
            noted = {message_id for message_id, _ in await self._notes(job, done.not_found)}
            done.not_found = [each for each in done.not_found if each not in noted]
        return Ended(failed=len(done.refused))

    async def _known(self, job: Job, letters: Sequence[Letter]) -> Mapping[Letter, Before]:
        """Return what this job did with these letters before."""
        if not job.done and not job.stages:
            return {}
        noted = await self._notes(job, [each.message_id for each in letters if each.message_id])
        ids = {message_id for message_id, _ in noted}
        return {
            each: Before.NOTED if (message_id, each.last_failed_at) in noted else Before.CAME_BACK
            for each in letters
            if (message_id := storable(each.message_id)) in ids
        }

    async def _notes(self, job: Job, message_ids: Collection[str]) -> set[tuple[str, datetime | None]]:
        values = which_notes(job.id, message_ids)
        return set(await (await self._connection.execute(self._sql(READ_NOTES), values)).fetchall())

    async def _count_retried(self, letters: Sequence[Letter]) -> None:
        values = {
            "source": SOURCE,
            "place": self.entry.queue,
            "ids": [each.group for each in letters],
            "causes": [each.cause.replace("\0", "") for each in letters],
            "types": [(each.type or "").replace("\0", "") for each in letters],
        }
        await self._connection.execute(self._sql(COUNT_RETRIED), values)
