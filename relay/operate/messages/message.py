"""One message in any state: its row, what it says, and what became of it."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.errors import NotFoundError
from relay.operate.messages.look import FoundPage, MessageState, Place, Search, of_day, rows_that_wait, search
from relay.operate.messages.whereabouts import RowId
from relay.outbox.identity import id_of_writer
from relay.servers.postgres.tables import Tables


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message without what it says: no payload, and no headers."""

    id: int
    message_id: UUID
    aggregate_type: str
    aggregate_id: str | None
    event_type: str
    state: MessageState
    lane: int
    created_at: datetime
    available_at: datetime | None
    sent_at: datetime | None
    parked_at: datetime | None
    attempts: int
    last_error: str | None
    held_behind: int | None
    quarantine: int | None
    exchange: str | None
    routing_key: str | None
    content_type: str | None
    writer: str | None
    written_as: str  # the role that wrote it; empty in rows from before migration 0021
    header_bytes: int | None
    payload_bytes: int | None
    is_json: bool
    group: str | None  # of failures, of a parked row
    said_edit_of: str | None  # what its header says

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", MessageState(self.state))

    @property
    def edit_of(self) -> UUID | None:
        """The message id of the row of which an operator has made this one."""
        try:
            return UUID(self.said_edit_of) if self.said_edit_of else None
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Located:
    """A message, and how it is found at once the next time.

    Attributes:
        place: of a sent row.
        others: ids of other rows that have its message id: writers may use one twice.
    """

    message: FoundMessage
    place: Place | None
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotLocated:
    """Where a message was looked for in vain.

    Attributes:
        looked_until: the time up to which sent rows were looked through; None: all of them.
        next: where a search would go on.
    """

    looked_until: datetime | None
    next: str | None


@dataclass(frozen=True, slots=True)
class Content:
    """What a message says, as JSON text; long payloads are cut short."""

    headers: str | None
    payload: str | None
    payload_bytes: bytes | None


EDIT_OF = "x-edit-of"  # the header of a message that an operator has made of another one
READ = SQL("""
    SELECT id, message_id, aggregate_type, aggregate_id, event_type, state, lane, created_at, available_at, sent_at,
           parked_at, attempts, last_error, held_behind, quarantine, exchange, routing_key, content_type, writer,
           written_as, pg_column_size(headers || '{{}}') AS header_bytes,
           coalesce(octet_length(payload::text), octet_length(payload_bytes)) AS payload_bytes,
           payload IS NOT NULL AS is_json,
           CASE state WHEN 'parked' THEN (SELECT failure FROM {schema}.parked_failure AS noted WHERE noted.id = row.id)
               END AS group,
           left(headers ->> {edit_of}, 36) AS said_edit_of
    FROM {rows} LIMIT 1
""")
READ_CONTENT = SQL("""
    SELECT left(headers::text, {length}) AS headers, left(payload::text, {length}) AS payload,
           substring(payload_bytes FROM 1 FOR {length}) AS payload_bytes
    FROM {rows} LIMIT 1
""")
AT_PLACE = SQL("(SELECT * FROM {schema}.message WHERE {of_day} AND ctid = {place}::tid AND {column} = {row}) AS row")
AUDIT = SQL("""
    INSERT INTO {schema}.operator_audit (done_by, command, target, why)
    SELECT %(by)s, 'message reveal', %(target)s::text, %(why)s
    WHERE NOT %(once)s OR NOT EXISTS (
        SELECT FROM {schema}.operator_audit
        WHERE target = %(target)s::text AND command = 'message reveal' AND done_by = %(by)s::text
            AND done_at > now() - interval '1 hour'
    )
""")
REVEALED = 1_000_000  # characters or bytes of a payload that a page shows
LOOK_FOR = 3.0  # seconds through sent rows, which have no index; a search goes on from there
TRIES = 3  # of a row that moves on while it is read


def find_message(
    tables: Tables,
    row: RowId,
    place: Place | None = None,
    *,
    after: str | None = None,
    seconds: float | None = None,
) -> Located | NotLocated:
    """Return the message of this id or message id, whatever its state is.

    Args:
        place: where it was found as a sent row; it is looked for elsewhere when it is not there.
        after: where an earlier search has ended.
        seconds: how long sent rows are searched, from the newest on; else `LOOK_FOR`.
    """
    if place is not None and (message := _read(tables, row, place)):
        return Located(message, place)
    ends, tries = time.monotonic() + (LOOK_FOR if seconds is None else seconds), 0
    while True:
        page = search(tables, Search(row=row), after=after)
        for line in page.lines[:1]:
            if message := _read(tables, line.id, line.place):
                return Located(message, line.place, tuple(other.id for other in page.lines[1:]))
            tries, page = tries + 1, FoundPage([], None)
        after = page.next
        if (after is None and not 0 < tries < TRIES) or time.monotonic() > ends:
            return NotLocated(page.looked_until, after)


def read_message(tables: Tables, row: RowId, place: Place | None = None) -> Located:
    """Return what `find_message` finds.

    Raises:
        NotFoundError: no row of this id was found.
    """
    found = find_message(tables, row, place)
    if isinstance(found, NotLocated):
        raise NotFoundError(f"message {row} is not here: look for it by its message id")
    return found


def reveal_message(
    tables: Tables,
    found: Located,
    *,
    by: str,
    why: str | None,
    length: int = REVEALED,
    is_noted_once: bool = False,
) -> Content:
    """Return what a message says, and note who has read it: both, or neither.

    Args:
        length: characters or bytes at most.
        is_noted_once: one note an hour is enough, as for the steps of a form.
    Raises:
        NotFoundError: the row is not there any more.
    """
    rows = rows_at(tables, found.message.id, found.place)
    with tables.transaction():
        note_reveal(tables, str(found.message.id), by=by, why=why, once=is_noted_once)
        content = tables.row(Content, READ_CONTENT, rows=rows, length=length)
        if content is None:
            raise NotFoundError(f"message {found.message.message_id} has just moved on: load the page again")
    return content


def note_reveal(tables: Tables, target: str, *, by: str, why: str | None = None, once: bool = False) -> None:
    """Note who reads what a message says: the row of this id, or what is in a queue."""
    tables.execute(AUDIT, {"by": by, "target": target, "why": why, "once": once})


def _read(tables: Tables, row: RowId, place: Place | None) -> FoundMessage | None:
    return tables.row(FoundMessage, READ, rows=rows_at(tables, row, place), edit_of=EDIT_OF)


def rows_at(tables: Tables, row: RowId, place: Place | None) -> Composed:
    """Return the part of a FROM by which a row is found at once, as `row`."""
    if place is None:
        return SQL("({}) AS row").format(rows_that_wait(tables, row))
    return tables.sql(
        AT_PLACE,
        of_day=of_day(place.day),
        place=f"({place.block},{place.line})",
        column=Identifier("id" if isinstance(row, int) else "message_id"),
        row=row,
    )


@dataclass(frozen=True, slots=True)
class AwaitedRoute:
    """The route in quarantine that a row waits for."""

    exchange: str
    reason: str
    paused_at: datetime | None


READ_ROUTE = SQL("SELECT exchange, reason, paused_at FROM {schema}.quarantine WHERE id = {route}")


def read_awaited_route(tables: Tables, message: FoundMessage) -> AwaitedRoute | None:
    """Return the route that a message waits for, without a count of its rows; None if it waits for no route."""
    if message.state is not MessageState.QUARANTINED or message.quarantine is None:
        return None
    return tables.row(AwaitedRoute, READ_ROUTE, route=message.quarantine)


@dataclass(frozen=True, slots=True)
class AppliedBy:
    """A consumer that has applied a message."""

    consumer: str
    at: datetime


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A consumer that holds a message back, to try it again."""

    consumer: str
    since: datetime
    attempts: int
    reason: str | None
    group: str  # of failures


@dataclass(frozen=True, slots=True)
class Audited:
    """What an operator did with a row, or with its dead letter.

    Attributes:
        job: that did it.
        sent_as: the message id of what was made of it.
    """

    at: datetime
    by: str
    command: str
    why: str | None
    job: int | None
    sent_as: UUID | None


@dataclass(frozen=True, slots=True)
class Handling:
    """What the consumers of one database have done with a message."""

    applied: list[AppliedBy]
    held: list[HeldBack]


# The inbox's key begins with the consumer: steps through the index find the consumers, then each one's message.
APPLIED = SQL("""
    WITH RECURSIVE consumer AS (
        (SELECT consumer_name FROM {schema}.processed_message WHERE message_day = {day} ORDER BY 1 LIMIT 1)
        UNION ALL
        SELECT (SELECT next.consumer_name FROM {schema}.processed_message AS next
                WHERE next.message_day = {day} AND next.consumer_name > consumer.consumer_name ORDER BY 1 LIMIT 1)
        FROM consumer WHERE consumer.consumer_name IS NOT NULL
    )
    SELECT done.consumer_name AS consumer, done.processed_at AS at
    FROM consumer JOIN {schema}.processed_message AS done
        ON done.consumer_name = consumer.consumer_name AND done.message_day = {day}
            AND done.message_id = ANY ({inbox_ids})
    ORDER BY at
""")
HELD = SQL("""
    SELECT consumer_name AS consumer, held_at AS since, attempts, reason,
           {schema}.failure_group('held', {schema}.failure_cause(concat_ws(': ', exception, error)), event_type,
                                  consumer_name) AS group
    FROM {schema}.held_message WHERE message_id = ANY ({inbox_ids}) ORDER BY held_at
""")
AUDITED = SQL("""
    SELECT done_at AS at, done_by AS by, command, why, job, sent_as
    FROM {schema}.operator_audit
    WHERE target = {id} AND (command LIKE 'parked %' OR command LIKE 'quarantine %' OR command = 'message reveal')
    UNION ALL
    SELECT done_at, done_by, 'dead-letters ' || command, why, job, NULL FROM {schema}.dead_letter_audit
    WHERE message_id = {text}
    ORDER BY at
""")


def read_outcome(tables: Tables, message: FoundMessage) -> Handling:
    """Return what became of a message after the relay, as the database of an inbox knows."""
    day = Literal(message.created_at.astimezone(UTC).date().isoformat())
    inbox_ids = Literal(_inbox_ids(message))
    return Handling(
        applied=tables.rows(AppliedBy, APPLIED, day=day, inbox_ids=inbox_ids),
        held=tables.rows(HeldBack, HELD, inbox_ids=inbox_ids),
    )


def read_held(tables: Tables, message_id: UUID) -> list[HeldBack]:
    """Return which consumers hold a message of which no row is known."""
    return tables.rows(HeldBack, HELD, inbox_ids=Literal([message_id]))


def _inbox_ids(message: FoundMessage) -> list[UUID]:
    """Return the ids by which an inbox may know it, whichever its scope is."""
    by_writer = [id_of_writer(message.message_id, message.written_as)] if message.written_as else []
    return [message.message_id, *by_writer]


def read_audit(tables: Tables, message: FoundMessage) -> list[Audited]:
    """Return what operators have done with a message."""
    return tables.rows(Audited, AUDITED, text=Literal(str(message.message_id)), id=Literal(str(message.id)))
