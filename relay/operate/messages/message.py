"""One message in any state: its row, what it says, and what became of it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.consume.message import id_of_writer
from relay.errors import NotFoundError
from relay.operate.messages.look import WAITING, MessageState, Place, of_day
from relay.operate.messages.whereabouts import RowId
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


@dataclass(frozen=True, slots=True)
class Content:
    """What a message says; long payloads are cut short."""

    headers: dict[str, Any] | None
    payload: str | None
    payload_bytes: bytes | None


READ = SQL("""
    SELECT id, message_id, aggregate_type, aggregate_id, event_type, state, lane, created_at, available_at, sent_at,
           parked_at, attempts, last_error, held_behind, quarantine, exchange, routing_key, content_type, writer,
           written_as, pg_column_size(headers || '{{}}') AS header_bytes,
           coalesce(octet_length(payload::text), octet_length(payload_bytes)) AS payload_bytes
    FROM {rows} WHERE {which} LIMIT 1
""")
READ_CONTENT = SQL("""
    SELECT CASE WHEN pg_column_size(headers || '{{}}') <= {length} THEN headers END AS headers,
           left(payload::text, {length}) AS payload, substring(payload_bytes FROM 1 FOR {length}) AS payload_bytes
    FROM {rows} WHERE {which} LIMIT 1
""")
AUDIT = SQL("""
    INSERT INTO {schema}.operator_audit (done_by, command, target, why)
    VALUES (%(by)s, 'message reveal', %(target)s, %(why)s)
""")
REVEALED = 100_000  # characters or bytes of a payload


def read_message(tables: Tables, row: RowId, place: Place | None) -> FoundMessage:
    """Return one message; a sent one by its place.

    Raises:
        NotFoundError: no row of this id is there; it may have gone on to another state.
    """
    rows, which = _where(tables, row, place)
    found = tables.row(FoundMessage, READ, rows=rows, which=which)
    if found is None:
        raise NotFoundError(f"message {row} is not here any more: look for it by its message id")
    return found


def reveal_message(tables: Tables, message: FoundMessage, *, place: Place | None, by: str, why: str | None) -> Content:
    """Return what a message says, and note who has read it: both, or neither.

    Raises:
        NotFoundError: the row is not there any more.
    """
    rows, which = _where(tables, message.id, place)
    with tables.transaction():
        note_reveal(tables, str(message.id), by=by, why=why)
        found = tables.row(Content, READ_CONTENT, rows=rows, which=which, length=REVEALED)
        if found is None:
            raise NotFoundError(f"message {message.id} is not here any more: look for it by its message id")
    return found


def note_reveal(tables: Tables, target: str, *, by: str, why: str | None = None) -> None:
    """Note who reads what a message says: the row of this id, or what is in a queue."""
    tables.execute(AUDIT, {"by": by, "target": target, "why": why})


def _where(tables: Tables, row: RowId, place: Place | None) -> tuple[Composed, Composed]:
    """Return the table or view, and the condition, by which a row is found at once."""
    column = Identifier("id" if isinstance(row, int) else "message_id")
    if place is None:
        states = SQL(", ").join(Literal(state) for state in WAITING)
        which = SQL("state IN ({}) AND {} = {}").format(states, column, Literal(row))
        return tables.sql(SQL("{schema}.message_state")), which
    at = SQL("{} AND ctid = {}::tid AND {} = {}").format(
        of_day(place.day), f"({place.block},{place.line})", column, Literal(row)
    )
    return tables.sql(SQL("{schema}.message")), at


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


@dataclass(frozen=True, slots=True)
class Audited:
    """What an operator did with a row, or with its dead letter."""

    at: datetime
    by: str
    command: str
    why: str | None


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
    SELECT consumer_name AS consumer, held_at AS since, attempts, reason
    FROM {schema}.held_message WHERE message_id = ANY ({inbox_ids}) ORDER BY held_at
""")
AUDITED = SQL("""
    SELECT done_at AS at, done_by AS by, command, why FROM {schema}.operator_audit WHERE target = {id}
    UNION ALL
    SELECT done_at, done_by, 'dead-letters ' || command, why FROM {schema}.dead_letter_audit
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


def _inbox_ids(message: FoundMessage) -> list[UUID]:
    """Return the ids by which an inbox may know it, whichever its scope is."""
    by_writer = [id_of_writer(message.message_id, message.written_as)] if message.written_as else []
    return [message.message_id, *by_writer]


def read_audit(tables: Tables, message: FoundMessage) -> list[Audited]:
    """Return what operators have done with a message."""
    return tables.rows(Audited, AUDITED, text=Literal(str(message.message_id)), id=Literal(str(message.id)))
