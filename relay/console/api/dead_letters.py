"""`/dead-letters`: what consumers gave up. A queue has no index: a list is read from its beginning, up to a limit.

Each request is a POST: a look takes letters out of their queue for a moment. After some looks copies take their place
(relay/operate/letters/queue.py).
"""

import asyncio
from datetime import UTC, datetime
from http import HTTPStatus
from io import BytesIO
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Asked, Once
from relay.console.api.parameters import (
    MOST,
    Closed,
    Group,
    Limit,
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
from relay.console.given import Configured, Operations, Operator, Owner, Sessions, within
from relay.jobs.job import Job
from relay.observe.printable import printable_json
from relay.operate.letters.audit import Entry
from relay.operate.letters.export import export
from relay.operate.letters.letter import Letter, Selection
from relay.operate.letters.work import Done, queues_of
from relay.operate.messages.message import note_reveal
from relay.operate.messages.whereabouts import MAX_ID
from relay.operate.sent.moment import parse_interval

router = APIRouter(prefix="/dead-letters", tags=["dead-letters"])
MessageId = Annotated[Text, Field(min_length=1)]


class LetterFilter(MessageFilter):
    """Which letters of which queue."""

    queue: QueueName
    message_ids: Annotated[tuple[MessageId, ...], Field(max_length=MOST)] = ()
    reason: Annotated[Text | None, Field(description="permanent, exhausted, poisoned, unhandled, invalid, ...")] = None
    exception: Annotated[Text | None, Field(description="A part of the exception.")] = None
    consumer: Text | None = None
    group: Group = None
    since: Moment = None
    until: Moment = None

    def selection(self, limit: int | None) -> Selection:
        """Return the letters that it means; UsageError when nothing can match."""
        since, until = parse_interval(self.since, self.until, datetime.now(UTC))
        return Selection(
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


class Listing(LetterFilter):
    """The first so many of these letters."""

    limit: Limit = 100


class Export(Listing):
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


class Change(LetterFilter, Reasoned, Paced):
    """Which letters a job changes, and why."""

    all: Annotated[bool, Field(description="Every letter; needed when there is no filter.")] = False
    limit: Annotated[int | None, Field(ge=1, le=MAX_ID, description="The first so many.")] = None


class Retry(Change, Staged):
    """Which letters to send back, and how carefully."""


@router.post("/look")
def look(operations: Operations, _: Operator, asked: Listing) -> Letters:
    """List dead letters: they are taken out of their queue for a moment, which counts that they came back."""
    dead = queues_of(asked.queue)[1]
    found = operations.list_letters(dead, asked.selection(asked.limit))
    read = found.read
    return Letters(queue=dead, messages=read.letters, letters=found.letters, matched=read.matched, warning=read.warning)


@router.post("/preview")
def preview(operations: Operations, who: Operator, asked: Listing) -> Done:
    """Count the letters that a retry or discard would change, by a look at the queue."""
    _, dead = queues_of(asked.queue)
    entry = Entry("discard", dead, None, who.name, "")
    return operations.preview_letters(entry, asked.selection(asked.limit))


@router.post("/reveal", response_model=dict[str, Any])
def reveal(operations: Operations, database: Sessions, who: Operator, asked: RevealLetter) -> Response:
    """Show one dead letter with its headers and its body, by a look at the queue; the audit notes who read it."""
    _, dead = queues_of(asked.queue)
    told = operations.show_letter(dead, asked.message_id)
    with database.session() as connection:
        note_reveal(connection, database.schema, asked.message_id, by=who.name, why=asked.reason)
    return Response(printable_json(orjson.dumps(told).decode()), media_type="application/json")


@router.post(
    "/export",
    response_class=Response,
    responses={200: {"description": "One letter a line.", "content": {"application/jsonl": {}}}},
)
def export_(settings: Configured, database: Sessions, who: Operator, asked: Export) -> Response:
    """Return letters as JSON Lines, by a look at the queue; the audit notes who read it."""
    _, dead = queues_of(asked.queue)
    lines = BytesIO()
    asyncio.run(export(settings.broker, dead, asked.selection(asked.limit), lines))
    with database.session() as connection:
        note_reveal(connection, database.schema, dead, by=who.name, why=asked.why.strip() or None)
    return Response(lines.getvalue(), media_type="application/jsonl")


@router.post("/retry", status_code=HTTPStatus.ACCEPTED, response_model=Job)
def retry(request: Request, once: Once, who: Operator, asked: Retry) -> Response:
    """Send letters back into the queue that they came from, where they are tried again with all attempts."""
    consumed, dead = queues_of(asked.queue)
    return _order(request, once, Entry("retry", dead, consumed, who.name, asked.why), asked)


@router.post("/discard", status_code=HTTPStatus.ACCEPTED, response_model=Job)
def discard(request: Request, once: Once, who: Owner, asked: Change) -> Response:
    """Throw letters away for good: export them first."""
    _, dead = queues_of(asked.queue)
    return _order(request, once, Entry("discard", dead, None, who.name, asked.why), asked)


def _order(request: Request, once: Asked, entry: Entry, asked: Change) -> Response:
    """Order a job, which a console runs."""
    selection, caution = asked.selection(asked.limit), asked.caution()
    check_choice(is_filtered=not selection.is_everything, is_all=asked.all)
    answer = once.in_transaction(
        entry.done_by,
        Job,
        lambda connection: within(request, connection).order_letters(entry, selection, caution=caution),
        status=HTTPStatus.ACCEPTED,
    )
    request.app.state.runner.wake()
    return answer
