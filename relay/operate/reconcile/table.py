"""What the outbox table has: the rows of a time range by message id, and which ids it has at all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from typing import NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.consume.apply.inbox import ID_OF_WRITER
from relay.operate.reconcile.interval import Interval
from relay.operate.sent.selection import SentSelection
from relay.outbox.identity import id_of_writer
from relay.servers.postgres.tables import Tables

FETCH_ROWS = 5000


class TableRow(NamedTuple):
    """A row of the table."""

    message_id: str
    id: int
    state: str
    event_type: str
    day: date
    sent_at: datetime | None
    is_meant: bool  # of the time range, and selected
    is_expected: bool  # sent before the grace period
    written_as: str = ""

    @property
    def inbox_ids(self) -> tuple[str, ...]:
        """The ids by which an inbox may know it, whichever its scope is."""
        if not self.written_as:
            return (self.message_id,)
        return self.message_id, str(id_of_writer(UUID(self.message_id), self.written_as))


# Each arm names its partitions: one WHERE with an OR would be left to the planner's wits.
ROWS = SQL("""
    SELECT row.message_id::text, row.id, row.state, row.event_type, row.day, row.sent_at, row.is_meant,
        row.is_meant AND row.sent_at < {expected_until}::timestamptz IS TRUE, row.written_as
    FROM (
        SELECT message_id, id, state, event_type, written_as, (sent_at AT TIME ZONE 'UTC')::date AS day, sent_at,
            (sent_at >= {since}::timestamptz AND sent_at < {until}::timestamptz AND {conditions}) IS TRUE AS is_meant
        FROM {schema}.sent({first}::timestamptz, {end}::timestamptz)
        UNION ALL
        SELECT message_id, id, CASE WHEN state = 'parked' AND held_behind IS NOT NULL THEN 'held' ELSE state END,
            event_type, written_as,
            (created_at AT TIME ZONE 'UTC')::date, NULL,
            (created_at >= {since}::timestamptz AND created_at < {until}::timestamptz AND {conditions}) IS TRUE
        FROM {schema}.message_state
        WHERE state <> 'sent'
    ) AS row
    ORDER BY row.message_id
""")


def rows_statement(schema: str, interval: Interval, selection: SentSelection) -> Composed:
    """Return the SELECT of `TableRow`s in the order of message_id; constants, so that other days are left out."""
    moments = {
        "since": interval.since,
        "until": interval.until,
        "first": interval.first_read,
        "end": interval.end_read,
        "expected_until": interval.expected_until,
    }
    return ROWS.format(
        schema=Identifier(schema),
        conditions=selection.conditions(),
        **{name: Literal(moment.isoformat()) for name, moment in moments.items()},
    )


ROWS_CURSOR = "outbox_rows"
COUNT_LISTED = SQL("MOVE FORWARD ALL IN {}").format(Identifier(ROWS_CURSOR))
TO_START = SQL("MOVE ABSOLUTE 0 IN {}").format(Identifier(ROWS_CURSOR))


@contextmanager
def list_rows(tables: Tables, interval: Interval, selection: SentSelection) -> Iterator[tuple[int, Iterator[TableRow]]]:
    """Sort the rows in the database; give their number, and them in the order of message_id."""
    with listed(tables.connection, ROWS_CURSOR, rows_statement(tables.schema, interval, selection)) as rows:
        number = tables.connection.execute(COUNT_LISTED).rowcount
        tables.connection.execute(TO_START)
        yield number, map(TableRow._make, rows)


@contextmanager
def listed(connection: psycopg.Connection, name: str, statement: Composed) -> Iterator[Iterator[TupleRow]]:
    """Run a SELECT into a cursor WITH HOLD, which holds no snapshot open, and give its rows."""
    with connection.cursor(name, scrollable=True, withhold=True) as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute(statement, binary=True)
        yield iter(cursor)


# The days have no index on message_id: each call reads the whole table once, against a hash table of the ids.
FIND = SQL("SELECT DISTINCT {id}::text FROM {schema}.message_state WHERE {id} = ANY (%(ids)s::uuid[])")
MESSAGE_ID = SQL("message_id")


def find_ids(tables: Tables, inbox_ids: Sequence[str]) -> set[str]:
    """Return which of these ids an inbox has of a row, in any state and of any day."""
    found: set[str] = set()
    for id_ in (MESSAGE_ID, SQL(ID_OF_WRITER)):  # the second one takes the server longer
        if left := [each for each in inbox_ids if each not in found]:
            rows = tables.connection.execute(tables.sql(FIND, id=id_), {"ids": left}, prepare=False)
            found.update(each for (each,) in rows)
    return found
