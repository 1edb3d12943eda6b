"""What operators have done and read: `operator_audit`, `dead_letter_audit` and the replays as one list."""

import heapq
import re
from dataclasses import dataclass
from datetime import datetime

from psycopg.sql import SQL

from relay.errors import UsageError
from relay.operate.asked import MAX_ID
from relay.servers.postgres.tables import Tables

FORM = re.compile(r"([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,19})")

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
# The audit has no row of a replay: it changes no message. The order has who and why.
REPLAYS = SQL("""
    SELECT id, made_at AS done_at, made_by AS done_by, made_as AS done_as, kind AS command, id::text AS target, why,
        id AS job
    FROM {schema}.job
    WHERE kind = 'replay' AND id < %(before)s ORDER BY id DESC LIMIT %(limit)s
""")
SOURCES = (ROWS, LETTERS, REPLAYS)
NOTE = SQL("""
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    VALUES (%(command)s, %(target)s, %(by)s, %(why)s)
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


def note(tables: Tables, command: str, target: str, *, by: str, why: str | None) -> None:
    """Note what an operator does to one thing, in the caller's transaction."""
    values = {"command": command, "target": target, "by": by, "why": why}
    tables.execute(NOTE, values)


def list_deeds(tables: Tables, *, limit: int, after: str | None = None) -> Deeds:
    """Return the newest deeds, or those behind the place `after`.

    Raises:
        UsageError: `after` is no place.
    """
    befores = _befores(after)
    pages: list[list[Deed]] = []
    for statement, before in zip(SOURCES, befores, strict=True):
        pages.append(tables.rows(Deed, statement, {"before": before, "limit": limit + 1}))
    merged = list(heapq.merge(*pages, key=lambda deed: deed.done_at, reverse=True))
    shown = merged[:limit]
    if len(merged) == len(shown):
        return Deeds(shown, None)
    places = [
        min((deed.id for deed in page if deed in shown), default=before)
        for page, before in zip(pages, befores, strict=True)
    ]
    return Deeds(shown, "-".join(map(str, places)))


def _befores(after: str | None) -> list[int]:
    if after is None:
        return [MAX_ID for _ in SOURCES]
    found = FORM.fullmatch(after)
    befores = [int(each) for each in found.groups()] if found else []
    if not befores or max(befores) > MAX_ID:
        raise UsageError("that is no place in the audit: begin with its first page")
    return befores
