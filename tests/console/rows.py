"""Rows in each state, as the relay leaves them."""

from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

SENT: LiteralString = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT 'customer', 'customer-' || number %% 7, (ARRAY['Issued', 'Paid'])[1 + number %% 2],
        json_build_object('number', number), 'sent', now()
    FROM generate_series(1, %s) AS number
"""
WAITING: LiteralString = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, last_error, parked_at)
    SELECT 'order', 'order-' || number %% 7, (ARRAY['Placed', 'Shipped'])[1 + number %% 2],
        json_build_object('number', number), %s, 'too large', now()
    FROM generate_series(1, %s) AS number
"""
ONE: LiteralString = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers, state, last_error)
    VALUES (%s, %s, %s, %s, %s, 'parked', %s) RETURNING id
"""
# A few minutes after midnight, what was sent before is of a day that new tables have not.
YESTERDAY: LiteralString = "SELECT outbox.make_day('message_sent', (now() AT TIME ZONE 'UTC')::date - 1);"
# The grace period is over.
AGE: LiteralString = YESTERDAY + " UPDATE outbox.message SET sent_at = now() - interval '5 min' WHERE state = 'sent'"


def sent(url: str, number: int) -> None:
    """Add sent rows of seven keys and two event types."""
    with psycopg.connect(url) as connection:
        connection.execute(SENT, [number])


def waiting(url: str, state: str, number: int) -> None:
    """Add rows of seven keys and two event types that wait in this state."""
    with psycopg.connect(url) as connection:
        connection.execute(WAITING, [state, number])


def parked(url: str, words: str, *, headers: dict[str, Any] | None = None) -> int:
    """Add a parked row whose every text is `words`; return its id."""
    with psycopg.connect(url) as connection:
        values = [words, words, words, Jsonb({"note": words}), Jsonb(headers or {}), words]
        (row,) = connection.execute(ONE, values).fetchone() or (0,)
    return int(row)
