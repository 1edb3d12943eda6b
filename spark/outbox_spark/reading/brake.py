"""How far a micro-batch of a stream goes: to the end of what was sent, or as far as its limits allow.

A limit is a brake, not a border: rows of one moment stay together, as an offset is a moment. A micro-batch with a limit
ends with its day. So a long backlog costs the table one day at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from outbox_spark.reading.plan import Day

ANY_SENT = SQL("SELECT sent_at FROM {schema}.sent(%(start)s, %(end)s) LIMIT 1")
FIRST_SENT = SQL("SELECT min(sent_at) FROM {schema}.sent(%(start)s, %(end)s)")
FIRST_BEYOND = SQL("SELECT sent_at FROM {schema}.sent(%(start)s, %(end)s) ORDER BY sent_at OFFSET %(rows)s LIMIT 1")
NEXT_MOMENT = SQL("SELECT min(sent_at) FROM {schema}.sent(%(start)s, %(end)s) WHERE sent_at > %(start)s")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a micro-batch has at most; None: any number."""

    rows: int | None
    time: timedelta | None  # of sending, from its first row on


def end_of_batch(
    connection: psycopg.Connection, schema: str, days: Sequence[Day], *, start: datetime, end: datetime, limits: Limits
) -> datetime | None:
    """Return the moment up to which the rows from `start` on are read, `end` at the latest; None without any row."""
    for day in days:
        first, beyond = max(start, day.first), min(end, day.next)
        if first >= beyond or _asked(connection, ANY_SENT, schema, start=first, end=beyond) is None:
            continue
        if limits == Limits(None, None):
            return end
        return _end_within(connection, schema, start=first, end=beyond, limits=limits)
    return None


def _end_within(
    connection: psycopg.Connection, schema: str, *, start: datetime, end: datetime, limits: Limits
) -> datetime:
    first = _asked(connection, FIRST_SENT, schema, start=start, end=end) or start
    if limits.time is not None:
        end = min(end, first + limits.time)
    if limits.rows is None:
        return end
    beyond = _asked(connection, FIRST_BEYOND, schema, start=first, end=end, rows=limits.rows)
    if beyond is not None and beyond == first:  # more rows of one moment than are wanted
        beyond = _asked(connection, NEXT_MOMENT, schema, start=first, end=end)
    return beyond or end


def _asked(connection: psycopg.Connection, query: SQL, schema: str, **values: object) -> datetime | None:
    statement: Composed = query.format(schema=Identifier(schema))
    found = connection.execute(statement, values).fetchone()
    return None if found is None else found[0]
