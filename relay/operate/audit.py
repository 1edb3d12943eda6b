"""What operators have done and read: the tables `operator_audit` and `dead_letter_audit` as one list."""

import heapq
import re
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Identifier

from relay.errors import UsageError
from relay.operate.whereabouts import MAX_ID

FORM = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")

ROWS = SQL("""
    SELECT id, done_at, done_by, done_as, command, target, why, job FROM {schema}.operator_audit
    WHERE id < %(before)s ORDER BY id DESC LIMIT %(limit)s
""")
LETTERS = SQL("""
    SELECT id, done_at, done_by, done_as, 'dead-letters ' || command AS command,
        concat_ws(' ', queue, message_id) AS target, why, job
    FROM {schema}.dead_letter_audit
    WHERE id < %(before)s ORDER BY id DESC LIMIT %(limit)s
""")


@dataclass(frozen=True, slots=True)
class Deed:
    """What a user or a program has done to one row, letter, job or day, or has read."""

    id: int  # in its table
    done_at: datetime
    done_by: str
    done_as: str  # the database login
    command: str
    target: str
    why: str | None
    job: int | None


@dataclass(frozen=True, slots=True)
class Deeds:
    """A page of deeds, the newest first."""

    deeds: list[Deed]
    next: str | None  # names the place of the next page


def list_deeds(connection: psycopg.Connection, schema: str, *, limit: int, after: str | None = None) -> Deeds:
    """Return the newest deeds, or those behind the place `after`.

    Raises:
        UsageError: `after` is no place.
    """
    befores = _befores(after)
    pages: list[list[Deed]] = []
    for statement, before in zip((ROWS, LETTERS), befores, strict=True):
        with connection.cursor(row_factory=class_row(Deed)) as cursor:
            values = {"before": before, "limit": limit + 1}
            pages.append(cursor.execute(statement.format(schema=Identifier(schema)), values).fetchall())
    merged = list(heapq.merge(*pages, key=lambda deed: deed.done_at, reverse=True))
    shown = merged[:limit]
    if len(merged) == len(shown):
        return Deeds(shown, None)
    places = [
        min((deed.id for deed in page if deed in shown), default=before)
        for page, before in zip(pages, befores, strict=True)
    ]
    return Deeds(shown, "-".join(map(str, places)))


def _befores(after: str | None) -> tuple[int, int]:
    if after is None:
        return MAX_ID, MAX_ID
    found = FORM.fullmatch(after)
    if found is None or max(int(found[1]), int(found[2])) > MAX_ID:
        raise UsageError("that is no place in the audit: begin with its first page")
    return int(found[1]), int(found[2])
