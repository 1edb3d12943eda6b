"""Held messages, as a consumer leaves them."""

from typing import LiteralString

import psycopg

HELD: LiteralString = """
    INSERT INTO outbox.held_message (consumer_name, key, message_id, event_type, exchange, routing_key, envelope, body,
        attempts, begun, first_failed_at, last_failed_at, due_at, exception, error)
    SELECT %(consumer)s, %(key)s, gen_random_uuid(), 'InvoiceIssued', '', 'billing', '', '',
        CASE number WHEN 1 THEN 3 ELSE 0 END, %(begun)s, now(), now(),
        CASE number WHEN 1 THEN now() + %(due_in)s * interval '1 second' ELSE 'infinity' END,
        CASE number WHEN 1 THEN 'ConnectionError' END, CASE number WHEN 1 THEN %(error)s END
    FROM generate_series(1, %(messages)s) AS number
"""


def held(
    connection: psycopg.Connection,
    key: str = "customer/1",
    *,
    consumer: str = "billing",
    messages: int = 1,
    due_in: float = 3600,
    begun: int = 0,
    error: str = "the tax office is closed",
) -> None:
    """Hold the key: its first message has failed, and is due in so many seconds; the others wait behind it."""
    values = {
        "consumer": consumer, "key": key, "messages": messages, "due_in": due_in, "begun": begun, "error": error,
    }  # fmt: skip
    connection.execute(HELD, values)
