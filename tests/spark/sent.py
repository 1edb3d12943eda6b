"""Sent rows to read, made by SQL."""

import psycopg

from tests.support.days import make_days

# Of five keys and two event types, with text that has to survive; every seventh row has bytes in place of JSON.
ADD = """
    INSERT INTO outbox.message
        (aggregate_type, aggregate_id, event_type, headers, payload, payload_bytes, state, sent_at)
    SELECT 'customer', 'C' || n %% 5, CASE n %% 3 WHEN 0 THEN 'InvoicePaid' ELSE 'InvoiceIssued' END,
        jsonb_build_object('n', n),
        CASE WHEN n %% 7 > 0
            THEN format('{"invoice_id": "Ü-%%s", "amount": %%s.25, "due": "2026-12-01T00:00:00"}', n, n)::json END,
        CASE WHEN n %% 7 = 0 THEN '\\x00ff'::bytea END,
        'sent', %(day)s::date::timestamp AT TIME ZONE 'UTC' + interval '1 second' * n
    FROM generate_series(1, %(rows)s) AS n
"""


def add_sent(connection: psycopg.Connection, day: str, rows: int) -> None:
    """Make a day of sent rows."""
    connection.execute(make_days("%s"), [day])
    connection.execute(ADD.encode(), {"day": day, "rows": rows})
