"""Rows as the tail reads them from the table."""

from collections.abc import Sequence

from relay.engine.row import Row

ROW = Row(
    lane=3,
    id=12345,
    message_id=b"0190a8f0-1111-7222-8333-444455556666",
    aggregate_type=b"customer",
    aggregate_id=b"42",
    event_type=b"InvoiceIssued",
    exchange=None,
    routing_key=None,
    content_type=None,
    headers=None,
    traceparent=None,
    tracestate=None,
    payload=b'{"a": 1}',
    payload_bytes=None,
    created_at=800_000_000_000_000,
    attempts=0,
    backoff_ms=0,
    excess=None,
    cost=0,
)


def rows(keys: Sequence[int | None]) -> list[Row]:
    """Return a row for each key, with ids from 1; None is a row without a key."""
    return [
        ROW._replace(id=number, aggregate_id=None if key is None else str(key).encode())
        for number, key in enumerate(keys, start=1)
    ]
