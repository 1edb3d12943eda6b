"""A job over dead letters: its letters lie in the broker, and its progress in the table of jobs.

The notes of the audit and the job's count are one transaction, before the letters are acknowledged. A job that was
killed in between finds its letters again, knows them by their notes, and only acknowledges them. So its counts are
exact, as far as letters have a message id.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from relay.config.settings import BrokerSettings
from relay.errors import JobTurnedError, PartlyDoneError, UsageError
from relay.jobs.job import NO_CAUTION, Caution, Job, Kind, Order, Source, make_job, pause_itself, running
from relay.operate.letters.audit import Entry, write_audit
from relay.operate.letters.change import Before, Command, Done, queues_of
from relay.operate.letters.letter import SOURCE, Letter, Selection
from relay.operate.letters.read import list_command
from relay.operate.letters.stages import Stages, Standing

QUEUE, SENT_TO = "queue", "sent_to"  # in the job's filter, next to what selects the letters

LOCK_JOB = SQL("SELECT state FROM {schema}.job WHERE id = %(job)s FOR UPDATE")
COUNT_DONE = SQL("UPDATE {schema}.job SET done = done + %(letters)s, saved_at = now() WHERE id = %(job)s")
END = SQL("""
    UPDATE {schema}.job
    SET state = 'done', failed = failed + %(refused)s, selected = coalesce(selected, done + %(refused)s),
        saved_at = now()
    WHERE id = %(job)s AND state = 'open'
""")
SAVE_STAGE = SQL("""
    UPDATE {schema}.job
    SET position = %(expected)s, failed = failed + %(came)s, stage = stage + %(has_ended)s::integer,
        state = CASE WHEN %(because)s::text IS NULL THEN state ELSE 'paused' END, paused_because = %(because)s,
        saved_at = now()
    WHERE id = %(job)s AND state = 'open'
""")
COUNT_RETRIED = SQL("""
    INSERT INTO {schema}.failure AS known (id, source, cause, event_type, place, retried)
    SELECT id, %(source)s, cause, event_type, %(place)s, count(*)
    FROM unnest(%(ids)s::text[], %(causes)s::text[], %(types)s::text[]) AS letter (id, cause, event_type)
    GROUP BY id, cause, event_type
    ON CONFLICT (id) DO UPDATE SET retried = known.retried + EXCLUDED.retried
""")
READ_NOTES = SQL("""
    SELECT message_id, last_failed_at FROM {schema}.dead_letter_audit
    WHERE job = %(job)s AND message_id = ANY (%(message_ids)s)
""")


def order_letters(
    connection: psycopg.Connection,
    schema: str,
    entry: Entry,
    selection: Selection,
    *,
    caution: Caution = NO_CAUTION,
    by_console: bool = False,
) -> Job:
    """Write down a job over the letters of a queue; `run_letters` does it. Letters are counted when they are named."""
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
    return make_job(connection, schema, order)


async def run_letters(
    connection: psycopg.Connection,
    schema: str,
    broker: BrokerSettings,
    job: Job,
    *,
    show: Callable[[int, int, int], None] = lambda *_: None,
    run: Callable[[Command], Awaitable[Done]] = Command.run_until_told,
) -> Done:
    """Do the rest of a job, until its end or a stop; what was done by earlier runs is not in the result.

    Args:
        run: does the work, and may stop it; until its end or a signal unless given.
    Raises:
        BusyError: another process runs it.
        PartlyDoneError: it was paused or cancelled, or could not go on; what is done stays done.
        OutboxError, psycopg.Error: nothing was done.
    """
    book = _Book(connection, schema, job)
    selection = Selection.from_json(job.filter)
    if selection.limit is not None:
        selection = replace(selection, limit=selection.limit - job.done)
    stages = Stages(standing_of(job), book.save_stage)
    with running(connection, schema, job):
        command = Command(
            broker,
            book.entry,
            selection,
            write=book.write,
            known=book.known,
            rate=job.rate,
            stages=stages,
            show=show,
        )
        done = await run(command)
        if done.paused_because is not None and not stages.has_paused:
            pause_itself(connection, schema, job.id, because=done.paused_because)
        if not done.is_stopped:
            book.end(refused=len(done.refused))
    done.job = job.id
    done.failed_again = job.failed + stages.failed
    done.not_found = book.not_done_before(done.not_found)
    return done


def done_by_console(job: Job) -> Done:
    """Return what a console has done with letters.

    Raises:
        PartlyDoneError: some are left, or the job has not ended.
    """
    queue = entry_of(job).queue
    if job.state != "done":
        because = f": {job.paused_because}" if job.paused_because else ""
        raise PartlyDoneError(f"{job.words} is {job.state} after {job.done} letters of {queue}{because}")
    if left := (job.selected or 0) - job.done:
        raise PartlyDoneError(
            f"{job.done} letters of {queue} are done, and {left} stay or are not there: see {list_command(queue)}"
        )
    return Done(queue, chosen=job.done, done=job.done, failed_again=job.failed, job=job.id)


def entry_of(job: Job) -> Entry:
    """Return what the notes of a job's letters have in common.

    Raises:
        UsageError: its queue has no dead letters, or it would send them elsewhere than where they came from. Who may
            write jobs could else let a console empty any queue.
    """
    queue, sent_to = job.filter.get(QUEUE), job.filter.get(SENT_TO)
    consumed, dead = queues_of(str(queue))
    if queue != dead or sent_to != (consumed if job.kind is Kind.RETRY else None):
        raise UsageError(f"{job.words} is over the queue {queue!r}, into {sent_to!r}: no command orders such a job")
    return Entry(job.kind, dead, sent_to, job.done_by, job.why or "", job.id)


def standing_of(job: Job) -> Standing:
    """Return where the stages of a job stand."""
    ends = job.stages or []
    return Standing(
        ends=ends[job.stage :],
        most=job.stop_when_failing,
        done=job.done,
        begun=ends[job.stage - 1] if job.stage else 0,
        expected=job.position,
    )


class _Book:
    """Keeps the notes and the count of a job."""

    def __init__(self, connection: psycopg.Connection, schema: str, job: Job) -> None:
        self.entry = entry_of(job)
        self._connection = connection
        self._schema = schema
        self._job = job

    def write(self, letters: Sequence[Letter]) -> None:
        """Commit the notes of letters and count them; for no letters it fails where it would for one.

        Raises:
            JobTurnedError: an operator has paused or cancelled the job.
        """
        with self._connection.transaction():
            values = {"job": self._job.id, "letters": len(letters)}
            (state,) = self._connection.execute(self._sql(LOCK_JOB), values).fetchone() or ("gone",)
            # Letters that the broker has confirmed are noted all the same.
            if state != "open" and not letters:
                raise JobTurnedError(f"{self._job.words} is {state}")
            write_audit(self._connection, self._schema, self.entry, letters)
            self._connection.execute(self._sql(COUNT_DONE), values)
            if self._job.kind is Kind.RETRY:
                self._count_retried(letters)

    def known(self, letters: Sequence[Letter]) -> Mapping[Letter, Before]:
        """Return what earlier runs did with these letters."""
        if not self._job.done and not self._job.stages:
            return {}
        noted = self._notes([each.message_id for each in letters if each.message_id])
        ids = {message_id for message_id, _ in noted}
        return {
            each: Before.NOTED if (each.message_id, each.last_failed_at) in noted else Before.CAME_BACK
            for each in letters
            if each.message_id in ids
        }

    def not_done_before(self, message_ids: list[str]) -> list[str]:
        """Return which of these no earlier run has done."""
        if not self._job.done:
            return message_ids
        done = {message_id for message_id, _ in self._notes(message_ids)}
        return [each for each in message_ids if each not in done]

    def save_stage(self, *, expected: int, came: int = 0, has_ended: bool = False, because: str | None = None) -> None:
        """Note where a stage stands, and pause the job when there is a reason; raises as `write`."""
        values = {"job": self._job.id, "expected": expected, "came": came, "has_ended": has_ended, "because": because}
        if not self._connection.execute(self._sql(SAVE_STAGE), values).rowcount:
            raise JobTurnedError(f"{self._job.words} was paused or cancelled")

    def end(self, *, refused: int) -> None:
        """Note that no letter is left to do."""
        self._connection.execute(self._sql(END), {"job": self._job.id, "refused": refused})

    def _notes(self, message_ids: Sequence[str]) -> set[tuple[str, datetime | None]]:
        values = {"job": self._job.id, "message_ids": list(message_ids)}
        return set(self._connection.execute(self._sql(READ_NOTES), values).fetchall())

    def _count_retried(self, letters: Sequence[Letter]) -> None:
        values = {
            "source": SOURCE,
            "place": self.entry.queue,
            "ids": [each.group for each in letters],
            "causes": [each.cause.replace("\0", "") for each in letters],
            "types": [(each.type or "").replace("\0", "") for each in letters],
        }
        self._connection.execute(self._sql(COUNT_RETRIED), values)

    def _sql(self, statement: SQL) -> Composed:
        return statement.format(schema=Identifier(self._schema))
