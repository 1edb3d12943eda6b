"""Send an edited copy of a parked row: a new row that names the old one, and what becomes of that, in one transaction.

The copy has a new message id, and a new id behind all rows of its key that are there. So rows that wait behind the old
one go out before the copy. An old row that stays parked holds the copy up under the key policy `hold`.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol
from uuid import UUID, uuid4

import psycopg
from psycopg.sql import SQL

from relay.errors import UsageError
from relay.jobs.job import Kind
from relay.operate.messages.whereabouts import RowId
from relay.operate.parked.read import PARKED, ParkedSelection, composed, show_parked
from relay.operate.parked.work import (
    DISCARD_HEADS,
    FATES,
    HOLD_BEHIND_REMAINING,
    RELEASE,
    RING,
    TAKE_LOCK,
    rows_not_found,
)
from relay.outbox.errors import EventError, HeaderError
from relay.outbox.events import Event
from relay.outbox.row import OTHER_BYTES, NewRow, row_of
from relay.servers.postgres.tables import Tables

BYTES = "application/octet-stream"  # what a row with bytes and without a content type is
UNCHANGED = "nothing is edited: `relay parked retry` sends the row as it is"

SEND_EDITED = SQL("""
    SELECT {schema}.send_edited(%(row)s::bigint, %(message_id)s::uuid, %(payload)s::json, %(payload_bytes)s::bytea,
        %(headers)s::jsonb, %(by)s::text, %(why)s::text)
""")


class EditRefusedError(UsageError):
    """What was edited cannot be sent; `field` says which part. Nothing was done."""

    def __init__(self, field: Literal["payload", "headers"], problem: str) -> None:
        super().__init__(problem)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What is new of a row; what is `None` stays as it is.

    Attributes:
        payload: text, JSON where the row's content type says so; or bytes of another content type.
        headers: all of them.
    """

    payload: str | bytes | None = None
    headers: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Edited:
    """The copy that was sent, and what became of the old row."""

    id: int
    message_id: UUID
    edit_of: UUID  # the message id of the old row
    old_id: int
    discarded: bool  # the old row; else it stays parked
    released: int  # rows let go from behind it, before the copy


def parse_headers(text: str) -> dict[str, Any]:
    """Return headers that were written as JSON.

    Raises:
        EditRefusedError: it is no JSON object.
    """
    try:
        headers = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise EditRefusedError("headers", "the headers are nested too deeply") from None
    except ValueError as error:
        raise EditRefusedError("headers", f"the headers are not JSON: {error}") from None
    if not isinstance(headers, dict):
        raise EditRefusedError("headers", 'the headers are a JSON object, such as {"tenant": "acme"}')
    return headers


class Addressed(Protocol):
    """What a row's writer said of it besides headers and payload."""

    @property
    def aggregate_type(self) -> str: ...
    @property
    def aggregate_id(self) -> str | None: ...
    @property
    def event_type(self) -> str: ...
    @property
    def routing_key(self) -> str | None: ...
    @property
    def content_type(self) -> str | None: ...


def check_edit(old: Addressed, edit: Edit, *, is_json: bool, most_bytes: int) -> NewRow:
    """Return an edit as the columns of a row.

    Args:
        is_json: whether the old row's payload is in the column `payload`.
        most_bytes: of a payload that the relay sends.
    Raises:
        EditRefusedError: the table would refuse the row, or the relay could never send it.
    """
    if edit == Edit():
        raise UsageError(UNCHANGED)
    content_type = old.content_type if is_json else old.content_type or BYTES
    event = Event(
        old.aggregate_type,
        old.aggregate_id,
        old.event_type,
        "{}" if edit.payload is None else edit.payload,
        headers=edit.headers,
        routing_key="" if old.routing_key is None else old.routing_key,  # it is not looked at again
        content_type=content_type,
    )
    try:
        return row_of(event, None, most_bytes)
    except HeaderError as error:
        raise EditRefusedError("headers", _told(error)) from None
    except EventError as error:
        raise EditRefusedError("payload", _told(error)) from None


def send_edited(
    tables: Tables,
    row: RowId,
    edit: Edit,
    *,
    discard: bool,
    by: str,
    why: str,
    most_bytes: int,
    message_id: UUID | None = None,
) -> Edited:
    """Send an edited copy of a parked row, and discard the old one or leave it parked.

    Args:
        message_id: of the copy; a second request with the same one is refused.
    Raises:
        NotFoundError: there is no such parked row; the message says where it is.
        EditRefusedError: see `check_edit`.
        UsageError: the row is not parked, waits behind another one, or was sent with this `message_id`.
    """
    with tables.transaction():
        tables.execute(TAKE_LOCK, name=f"{tables.schema}.park")
        old = show_parked(tables, row, length=1)
        if old.state != PARKED:
            raise UsageError(f"{row} is {old.state}: an edited copy is sent of a parked row")
        if reasons := rows_not_found(tables, Kind.DISCARD, ParkedSelection(ids=[old.id])):
            raise UsageError(reasons[0])
        new = check_edit(old, edit, is_json=old.payload is not None, most_bytes=most_bytes)
        copy = message_id or uuid4()
        values = {
            "row": old.id,
            "message_id": copy,
            "payload": None if edit.payload is None else new.payload,
            "payload_bytes": None if edit.payload is None else new.payload_bytes,
            "headers": new.headers,
            "by": by,
            "why": why,
        }
        try:
            (made,) = tables.one(SEND_EDITED, values)
        except psycopg.errors.UniqueViolation:
            raise UsageError(f"message {copy} was sent already: an edit is sent once") from None
        released = _discard(tables, old.id, by=by, why=why) if discard else 0
    return Edited(made, copy, old.message_id, old.id, discard, released)


def _discard(tables: Tables, row: int, *, by: str, why: str) -> int:
    """Discard the old row as a job does, and return how many rows go from behind it."""
    values = {"heads": [row], "by": by, "why": why, "job": None}
    fates = composed(tables.schema, FATES)
    tables.execute(HOLD_BEHIND_REMAINING, values, fates=fates)
    released = tables.execute(RELEASE, values, fates=fates).rowcount
    tables.execute(DISCARD_HEADS, values)
    tables.execute(RING, name=f"{tables.schema}.doorbell")
    return released


def _told(error: EventError) -> str:
    """Return what is wrong, without the name of the row, and without advice for its writer."""
    return str(error).partition(": ")[2].removesuffix(f"; {OTHER_BYTES}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")
