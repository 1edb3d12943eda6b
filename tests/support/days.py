"""Days of sent rows and of the inbox, made by SQL for the tests of retention; counted back from today in UTC."""

from typing import LiteralString

import psycopg


def make_days(first: LiteralString, count: LiteralString = "1") -> LiteralString:
    """Return SQL that makes days of sent rows of any age. The arguments are SQL, too."""
    return (
        f"SELECT outbox.make_day('message_sent', day) FROM (SELECT ({first})::date + n FROM"
        f" generate_series(0, {count} - 1) AS n) AS wanted (day)"
        " WHERE outbox.attached_day('message_sent', day) IS NULL"
    )


ADD_DAY = """
    WITH made AS MATERIALIZED (
        SELECT CASE WHEN outbox.attached_day('message_sent', day) IS NULL
                THEN outbox.make_day('message_sent', day) END, -- which is for the owner, and knows no limit
            day::timestamp AT TIME ZONE 'UTC' AS midnight
        FROM (SELECT (now() AT TIME ZONE 'UTC')::date - %(ago)s::integer AS day) AS wanted
    )
    SELECT midnight FROM made
"""
ADD_ROWS = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT 'customer', n::text, 'InvoiceIssued', '{"n": 1}', 'sent', %(midnight)s + interval '12 hours'
    FROM generate_series(1, %(rows)s) AS n
"""
ADD_INBOX_DAY = "SELECT outbox.ensure_inbox_days((now() AT TIME ZONE 'UTC')::date - %(ago)s::integer, 1)"
ADD_APPLIED = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
    SELECT 'projection', gen_random_uuid(), (now() AT TIME ZONE 'UTC')::date - %(ago)s::integer
    FROM generate_series(1, %(rows)s)
"""
NAME = "SELECT %s || to_char((now() AT TIME ZONE 'UTC')::date - %s::integer, '_YYYYMMDD')"
AGES = """
    SELECT (now() AT TIME ZONE 'UTC')::date - to_date(right(relname, 8), 'YYYYMMDD') AS age
    FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relname ~ ('^' || %s || '_[0-9]{8}$')
"""


class Days:
    """The days of sent rows of one database."""

    parent = "message_sent"

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def add(self, ago: int, rows: int) -> None:
        """Make the day `ago` days before today, with rows that were sent at its noon."""
        row = self.connection.execute(ADD_DAY, {"ago": ago}).fetchone()
        assert row is not None
        self.connection.execute(ADD_ROWS, {"midnight": row[0], "rows": rows})

    def past(self) -> set[int]:
        """Return the past days that have a table, attached or not, as days before today."""
        return {ago for (ago,) in self.connection.execute(AGES, [self.parent]) if ago > 0}

    def table(self, ago: int) -> str:
        """Return the name of a day's table, even if there is no such table."""
        row = self.connection.execute(NAME, [self.parent, ago]).fetchone()
        assert row is not None
        return f"outbox.{row[0]}"

    def run(self, statement: str) -> None:
        self.connection.execute(statement.encode())

    def value(self, query: str) -> object:
        """Return the only value of the only row."""
        row = self.connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


class InboxDays(Days):
    """The days of an inbox."""

    parent = "processed_message"

    def add(self, ago: int, rows: int) -> None:
        """Make the day `ago` days before today, with messages of that day."""
        self.connection.execute(ADD_INBOX_DAY, {"ago": ago})
        self.connection.execute(ADD_APPLIED, {"ago": ago, "rows": rows})
