"""What can be asked of dead letters: the noun `dead-letters`.

A queue has no index: a list is read from its beginning, up to a limit. Each request is a POST: a look takes letters out
of their queue for a moment. After some looks copies take their place (relay/operate/letters/queue.py).
"""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field

from relay.jobs.job import Job, Kind
from relay.operate.asked import (
    A_MOMENT,
    MOST,
    Closed,
    Group,
    Limit,
    Many,
    MaybeReasoned,
    MessageFilter,
    Moment,
    Paced,
    QueueName,
    Reasoned,
    Staged,
    Text,
    check_choice,
)
from relay.operate.letters.audit import AuditEntry
from relay.operate.letters.document import document
from relay.operate.letters.letter import Letter, LetterSelection
from relay.operate.letters.read import count_letters, list_letters, show_letter
from relay.operate.letters.work import LettersDone, order_letters, preview_letters, queues_of
from relay.operate.messages.message import note_reveal
from relay.operate.operation import Effect, Operation, Role, Servers, operation
from relay.operate.sent.moment import parse_interval

MessageId = Annotated[Text, Field(min_length=1)]


class LetterFilter(MessageFilter):
    """What letters have in common."""

    reason: Annotated[Text | None, Field(description="permanent, exhausted, poisoned, unhandled, invalid, ...")] = None
    exception: Annotated[Text | None, Field(description="A part of the exception.")] = None
    consumer: Annotated[Text | None, Field(description="That this consumer gave up.")] = None
    group: Group = None
    since: Annotated[Moment, Field(description=f"Failed at or after {A_MOMENT}.")] = None
    until: Annotated[Moment, Field(description="Failed before.")] = None


class ChosenLetters(LetterFilter):
    """Which letters of which queue."""

    queue: QueueName
    message_ids: Annotated[tuple[MessageId, ...], Field(max_length=MOST)] = ()

    def selection(self, limit: int | None) -> LetterSelection:
        """Return the letters that it means; UsageError when nothing can match."""
        since, until = parse_interval(self.since, self.until, datetime.now(UTC))
        return LetterSelection(
            message_ids=frozenset(self.message_ids),
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            type=self.event_type,
            reason=self.reason,
            exception=self.exception,
            consumer=self.consumer,
            since=since,
            until=until,
            group=self.group,
            limit=limit,
        )


class ListLetters(ChosenLetters):
    """The first so many of these letters."""

    limit: Limit = 100


class ExportLetters(ListLetters):
    """Which letters to save, and why."""

    why: Text = ""


class RevealLetter(MaybeReasoned):
    """Which letter to read, and why."""

    queue: QueueName
    message_id: MessageId


class Letters(Closed):
    """Letters, and how many there are in the queue, also of others."""

    queue: str
    messages: int
    matched: Annotated[int, Field(description="Of those that were read.")]
    letters: list[Letter]
    warning: Annotated[str | None, Field(description="Letters that a delivery limit of their queue may drop.")]


class ChangeLetters(ChosenLetters, Many, Reasoned, Paced):
    """Which letters a job changes, and why."""


class RetryLetters(ChangeLetters, Staged):
    """Which letters to send back, and how carefully."""


@operation("dead-letters.look", "POST /dead-letters/look", Role.OPERATOR)
def look(at: Servers, asked: ListLetters) -> Letters:
    """List dead letters: they are taken out of their queue for a moment, which counts that they came back."""
    dead = queues_of(asked.queue)[1]
    letters, read = asyncio.run(list_letters(at.settings.broker, dead, asked.selection(asked.limit)))
    return Letters(queue=dead, messages=read.letters, letters=letters, matched=read.matched, warning=read.warning)


@operation("dead-letters.preview", "POST /dead-letters/preview", Role.OPERATOR)
def preview(at: Servers, asked: ListLetters) -> LettersDone:
    """Count the letters that a retry or discard would change, by a look at the queue."""
    entry = AuditEntry(Kind.DISCARD, queues_of(asked.queue)[1], None, at.by, "")
    return asyncio.run(preview_letters(at.settings.broker, entry, asked.selection(asked.limit)))


@operation("dead-letters.reveal", "POST /dead-letters/reveal", Role.OPERATOR)
def reveal(at: Servers, asked: RevealLetter) -> dict[str, Any]:
    """Show one dead letter with its headers and its body, by a look at the queue; the audit notes who read it."""
    told = document(asyncio.run(show_letter(at.settings.broker, queues_of(asked.queue)[1], asked.message_id)))
    if at.by_console:  # who has the broker's password reads the queue without a note, too
        with at.connect(None) as tables:
            note_reveal(tables, asked.message_id, by=at.by, why=asked.reason)
    return told


@operation("dead-letters.retry", "POST /dead-letters/retry", Role.OPERATOR, Effect.ORDERED)
def retry(at: Servers, asked: RetryLetters) -> Job:
    """Send letters back into the queue that they came from, where they are tried again with all attempts."""
    consumed, dead = queues_of(asked.queue)
    return _order(at, AuditEntry(Kind.RETRY, dead, consumed, at.by, asked.why), asked)


@operation("dead-letters.discard", "POST /dead-letters/discard", Role.OWNER, Effect.ORDERED)
def discard(at: Servers, asked: ChangeLetters) -> Job:
    """Throw letters away for good: export them first."""
    return _order(at, AuditEntry(Kind.DISCARD, queues_of(asked.queue)[1], None, at.by, asked.why), asked)


CHANGES: dict[Kind, Operation[Any, Job]] = {Kind.RETRY: retry, Kind.DISCARD: discard}


def _order(at: Servers, entry: AuditEntry, asked: ChangeLetters) -> Job:
    """Write down a job."""
    selection, caution = asked.selection(asked.limit), asked.caution()
    check_choice(is_filtered=not selection.is_everything, is_all=asked.all)
    if at.by_console:  # a command finds out at once that there is no such queue
        asyncio.run(count_letters(at.settings.broker, entry.queue))
    with at.connect(None) as tables:
        return order_letters(tables, entry, selection, caution=caution, by_console=at.by_console)
