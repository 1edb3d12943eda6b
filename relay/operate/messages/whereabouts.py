"""Where a row is, for every command that is asked about one by its id."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

import psycopg
from psycopg.sql import SQL

from relay.errors import UsageError
from relay.observe.printable import printable, utc
from relay.operate.asked import MAX_ID
from relay.servers.postgres.tables import Tables

RowId = int | UUID  # its id, or its message id

SENT_TIMEOUT = 20.0  # seconds; the days of sent rows have no index by id, and are read from end to end

# What waits comes first: it is found at once.
FIND = SQL("""
    SELECT id, message_id, state, sent_at, available_at > now() AS is_delayed, available_at, held_behind, quarantine
    FROM {schema}.message_state
    WHERE state IN ({states})
        AND (id = ANY (%(ids)s::bigint[]) OR message_id = ANY (%(message_ids)s::uuid[]))
""")
SET_TIMEOUT = SQL("SELECT set_config('statement_timeout', {milliseconds}, true)")


class WhyMissing(StrEnum):
    """Why no row was found, as a command says it."""

    UNKNOWN = "no row of the outbox has this id: it was never committed, or its day was dropped"
    UNREAD = f"it does not wait, and the sent rows could not be searched within {SENT_TIMEOUT:g} s"

    @property
    def words(self) -> str:
        """What a command says of it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Found:
    """A row as far as it says where it is."""

    id: int
    message_id: UUID
    state: str
    sent_at: datetime | None
    is_delayed: bool | None
    available_at: datetime | None
    held_behind: int | None
    quarantine: int | None

    @property
    def words(self) -> str:
        """What a command says of it."""
        match self.state:
            case "sent":
                return f"it was sent at {_moment(self.sent_at)}"
            case "parked":
                return f"it is parked{self._behind}: see `relay parked show {self.id}`"
            case "quarantined":
                place = f"in route {self.quarantine}{self._behind}"
                return f"it is quarantined {place}: see `relay quarantine show {self.id}`"
            case "archived":
                return f"it is archived: `relay parked restore {self.id}` parks it again"
            case "discarded":
                return f"it was discarded: `relay parked restore --discarded {self.id}` parks it again"
            case _:
                return f"it is pending{self._pending_words}"

    @property
    def _behind(self) -> str:
        return f" behind {self.held_behind}" if self.held_behind else ""

    @property
    def _pending_words(self) -> str:
        if self.quarantine is not None:
            return f", and tries route {self.quarantine} just now"
        return f", and due at {_moment(self.available_at)}" if self.is_delayed else ""


def find_rows(tables: Tables, wanted: Collection[RowId]) -> dict[RowId, Found | WhyMissing]:
    """Return for each id the row that has it, or why no row was found."""
    found = _find(tables, wanted, is_sent=False)
    missing = [each for each in wanted if each not in found]
    lack = WhyMissing.UNKNOWN
    if missing:
        try:
            with tables.transaction():
                tables.execute(SET_TIMEOUT, milliseconds=str(round(SENT_TIMEOUT * 1000)))
                found |= _find(tables, missing, is_sent=True)
        except psycopg.errors.QueryCanceled:
            lack = WhyMissing.UNREAD
    return {each: found.get(each, lack) for each in wanted}


def whereabouts(tables: Tables, wanted: Collection[RowId]) -> dict[RowId, str]:
    """Return in words where each row is: "it was sent at 2026-11-21 08:00:00Z"."""
    return {each: row.words for each, row in find_rows(tables, wanted).items()}


def row_id(text: str) -> RowId:
    """Return the id or message id that an operator has written.

    Raises:
        UsageError: it is neither.
    """
    try:
        if not (text.isascii() and text.isdecimal()):
            return UUID(text)
        if (number := int(text)) <= MAX_ID:
            return number
    except ValueError:
        pass
    raise UsageError(f"{printable(text)} is no id and no message id")


def row_ids(texts: Collection[str]) -> list[RowId]:
    return [row_id(text) for text in texts]


def as_parameters(wanted: Collection[RowId]) -> dict[str, list[int] | list[UUID]]:
    """Return ids as the parameters `ids` and `message_ids` of a statement."""
    return {
        "ids": [each for each in wanted if isinstance(each, int)],
        "message_ids": [each for each in wanted if isinstance(each, UUID)],
    }


def _find(tables: Tables, wanted: Collection[RowId], *, is_sent: bool) -> dict[RowId, Found]:
    if not wanted:
        return {}
    states = ("sent",) if is_sent else ("pending", "parked", "quarantined", "discarded", "archived")
    rows = tables.rows(Found, FIND, as_parameters(wanted), states=SQL(", ").join(states))
    by_id: dict[RowId, Found] = {row.id: row for row in rows}
    return by_id | {row.message_id: row for row in rows}


def _moment(moment: datetime | None) -> str:
    return "an unknown time" if moment is None else utc(moment)
