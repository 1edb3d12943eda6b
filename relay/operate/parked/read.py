"""What could not be delivered: which rows, and why.

Under the key policy `hold` later rows of a key are parked behind its first one, the head.
"""

from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.rows import dict_row
from psycopg.sql import SQL, Composed, Identifier
from pydantic import ConfigDict

from relay.engine.read.pending import MAY_BE_WRITTEN
from relay.errors import NotFoundError
from relay.operate.messages.whereabouts import RowId, as_parameters, whereabouts
from relay.servers.postgres.tables import Tables

PARKED, ARCHIVED = "parked", "archived"  # states
IS = {PARKED: SQL("'parked'"), ARCHIVED: SQL("'archived'"), "discarded": SQL("'discarded'")}

IS_HEAD = SQL("""(row.held_behind IS NULL OR NOT EXISTS (
        SELECT FROM {schema}.message_state AS before WHERE before.state = 'parked' AND before.id = row.held_behind))""")

MATCHES = SQL("""row.state = {state}
        AND (%(ids)s::bigint[] IS NULL OR row.id = ANY (%(ids)s::bigint[]))
        AND (%(message_ids)s::uuid[] IS NULL OR row.message_id = ANY (%(message_ids)s::uuid[]))
        AND (%(aggregate_type)s::text IS NULL OR row.aggregate_type = %(aggregate_type)s::text)
        AND (%(aggregate_id)s::text IS NULL OR row.aggregate_id = %(aggregate_id)s::text)
        AND (%(event_type)s::text IS NULL OR row.event_type = %(event_type)s::text)
        AND (%(reason)s::text IS NULL OR strpos(lower(row.last_error), lower(%(reason)s::text)) > 0)
        AND {of_group}
        AND {of_job}""")

# By the table that a trigger keeps, so that no cause is computed again (migrations/versions/0015_jobs.py).
# Never in an OR: PostgreSQL would then look at every parked row, and find no way by the group's index.
OF_GROUP = SQL("""EXISTS (
            SELECT FROM {schema}.parked_failure AS noted
            WHERE noted.failure = %(group)s::text AND noted.id = row.id
        )""")
OF_GROUP_SET_ASIDE = SQL("""{schema}.failure_group(
            'parked', {schema}.failure_cause(row.last_error), row.event_type, row.exchange) = %(group)s::text""")
# The last note tells: a row may have been restored since, and set aside by another job.
OF_JOB = SQL("""(
            SELECT noted.job FROM {schema}.operator_audit AS noted
            WHERE noted.target = row.id::text AND noted.command IN ({set_aside})
            ORDER BY noted.id DESC LIMIT 1
        ) = %(job)s::bigint""")
SETTING_ASIDE = SQL("'parked archive', 'parked discard', 'quarantine discard'")  # commands of the audit


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedSelection:
    """Which parked rows; what is `None` selects nothing away."""

    ids: list[int] | None = None
    message_ids: list[UUID] | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    event_type: str | None = None
    reason: str | None = None  # a part of last_error, upper and lower case alike
    group: str | None = None  # of failures
    job: int | None = None  # that has set them aside
    limit: int | None = None  # the first so many, by id

    @property
    def is_everything(self) -> bool:
        return all(value is None for name, value in asdict(self).items() if name != "limit")

    def as_json(self) -> dict[str, Any]:
        """Return what is set, for the table `job` and for people."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.message_ids is not None:
            given["message_ids"] = [str(each) for each in self.message_ids]
        return given

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "ParkedSelection":
        values = {each.name: stored[each.name] for each in fields(cls) if each.name in stored}
        if "message_ids" in values:
            values["message_ids"] = [UUID(text) for text in values["message_ids"]]
        return cls(**values)


EVERYTHING = ParkedSelection()


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked row, without its payload."""

    id: int
    message_id: UUID
    aggregate_type: str
    aggregate_id: str | None
    event_type: str
    attempts: int
    created_at: datetime
    parked_at: datetime | None
    last_error: str | None
    held_behind: int | None
    written_as: str  # the role that wrote it; empty in rows from before migration 0021
    held: int  # rows that wait behind this one


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """A parked, archived or discarded row with everything that would be sent; the payload may be cut short."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")  # as `relay` prints it

    id: int
    message_id: UUID
    aggregate_type: str
    aggregate_id: str | None
    event_type: str
    state: str
    attempts: int
    created_at: datetime
    parked_at: datetime | None
    last_error: str | None
    held_behind: int | None
    exchange: str | None
    routing_key: str | None
    content_type: str | None
    headers: dict[str, Any] | None  # also `None` where they are too large to be shown
    headers_size: int | None  # bytes of jsonb
    writer: str | None
    written_as: str  # the role that wrote it; empty in rows from before migration 0021
    payload: str | None
    payload_bytes: bytes | None
    payload_size: int
    retried_at: datetime | None = None  # the last time
    retried_by: str | None = None
    retry_note: str | None = None
    set_aside_at: datetime | None = None  # the last time; None as well where the relay has discarded it, by its route
    set_aside_by: str | None = None
    set_aside_note: str | None = None
    set_aside_job: int | None = None


LIST_PARKED = SQL("""
    SELECT row.id, row.message_id, row.aggregate_type, row.aggregate_id, row.event_type, row.attempts,
           row.created_at, row.parked_at, row.last_error, row.held_behind, row.written_as,
           (SELECT count(*) FROM {schema}.message_state AS held
            WHERE held.state = 'parked' AND held.aggregate_type = row.aggregate_type
              AND held.aggregate_id = row.aggregate_id AND held.held_behind = row.id) AS held
    FROM {schema}.message_state AS row
    WHERE {matches} AND (%(with_held)s OR {is_head}) AND row.id > %(after)s
    ORDER BY row.id
    LIMIT %(limit)s
""")
COUNT_PARKED = SQL("""
    SELECT count(*) FROM {schema}.message_state AS row WHERE {matches} AND (%(with_held)s OR {is_head})
""")


def list_parked(
    tables: Tables, selection: ParkedSelection, *, with_held: bool, state: str = PARKED, after: int = 0
) -> tuple[list[Parked], int]:
    """Return what `first_parked` returns, and how many rows there are beyond `selection.limit`.

    The number does not depend on `after`.
    """
    rows = first_parked(tables, selection, with_held=with_held, state=state, after=after)
    counted = composed(tables.schema, COUNT_PARKED, state, selection)
    return rows, tables.one(counted, {**asdict(selection), "with_held": with_held})[0]


def first_parked(
    tables: Tables, selection: ParkedSelection, *, with_held: bool, state: str = PARKED, after: int = 0
) -> list[Parked]:
    """Return the selected rows behind the id `after`, by id.

    Without `with_held`, rows that only wait behind another one of their key are left out. `state` is that of
    the rows that are meant: parked, archived or discarded.
    """
    listed = composed(tables.schema, LIST_PARKED, state, selection)
    return tables.rows(Parked, listed, {**asdict(selection), "with_held": with_held, "after": after})


SHOW_PARKED = SQL("""
    SELECT id, message_id, aggregate_type, aggregate_id, event_type, state, attempts, created_at, parked_at,
           last_error, held_behind, exchange, routing_key, content_type, writer, written_as,
           CASE WHEN {may_be_written} THEN headers END AS headers,
           pg_column_size(headers || '{{}}') AS headers_size,
           left(payload::text, %(length)s) AS payload,
           substring(payload_bytes FROM 1 FOR %(length)s) AS payload_bytes,
           coalesce(octet_length(payload::text), octet_length(payload_bytes)) AS payload_size
    FROM {schema}.message_state
    WHERE state IN ('parked', 'discarded', 'archived')
        AND (id = ANY (%(ids)s::bigint[]) OR message_id = ANY (%(message_ids)s::uuid[]))
""")


LAST_RETRY = SQL("""
    SELECT done_at AS retried_at, done_by AS retried_by, why AS retry_note FROM {schema}.operator_audit
    WHERE command = 'parked retry' AND target = %(id)s::text
    ORDER BY id DESC LIMIT 1
""")
LAST_SET_ASIDE = SQL("""
    SELECT done_at AS set_aside_at, done_by AS set_aside_by, why AS set_aside_note, job AS set_aside_job
    FROM {schema}.operator_audit
    WHERE command IN ({set_aside}) AND target = %(id)s::text
    ORDER BY id DESC LIMIT 1
""")


def show_parked(tables: Tables, row: RowId, *, length: int) -> ParkedMessage:
    """Return one row by its id or message id, with the first `length` characters or bytes of its payload.

    Raises:
        NotFoundError: no such row is parked, archived or discarded; the message says where it is.
    """
    parameters = {**as_parameters([row]), "length": length}
    message = tables.row(ParkedMessage, composed(tables.schema, SHOW_PARKED, may_be_written=MAY_BE_WRITTEN), parameters)
    if message is None:
        raise NotFoundError(f"{row} is not parked: {whereabouts(tables, [row])[row]}")
    with tables.connection.cursor(row_factory=dict_row) as cursor:
        retried = cursor.execute(composed(tables.schema, LAST_RETRY), {"id": message.id}).fetchone()
        aside = cursor.execute(composed(tables.schema, LAST_SET_ASIDE), {"id": message.id}).fetchone()
    return replace(message, **retried or {}, **aside or {})


def composed(
    schema: str, statement: SQL, state: str = PARKED, selection: ParkedSelection = EVERYTHING, **parts: Composed
) -> Composed:
    """Fill the names and the shared conditions into a statement about rows of a state.

    Args:
        selection: has conditions that are left out where it does not ask for them.
    """
    names = {"schema": Identifier(schema), "set_aside": SETTING_ASIDE}
    of_group = OF_GROUP if state == PARKED else OF_GROUP_SET_ASIDE
    matches = MATCHES.format(
        state=IS[state],
        of_group=SQL("true") if selection.group is None else of_group.format(**names),
        of_job=SQL("true") if selection.job is None else OF_JOB.format(**names),
    )
    return statement.format(**names, is_head=IS_HEAD.format(**names), matches=matches, **parts)
