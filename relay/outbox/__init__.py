"""The write side: write an event in the transaction that makes it true.

from relay.outbox import Event, add

with psycopg.connect(url) as connection:
    connection.execute("UPDATE invoice SET state = 'issued' WHERE id = 42")
    add(connection, Event("Invoice", "42", "InvoiceIssued", {"invoice": 42}))
"""

from typing import TYPE_CHECKING, Any

from relay.errors import importing
from relay.outbox.declared import event, event_of, upcast
from relay.outbox.errors import (
    EventError,
    FieldError,
    HeaderError,
    NotAwaitedError,
    NoTransactionError,
    PayloadError,
    PayloadTooLargeError,
)
from relay.outbox.events import Event
from relay.outbox.write import add, add_many

if TYPE_CHECKING:
    from relay.outbox.orm import OutboxMessage

__all__ = [
    "Event",
    "EventError",
    "FieldError",
    "HeaderError",
    "NoTransactionError",
    "NotAwaitedError",
    "OutboxMessage",
    "PayloadError",
    "PayloadTooLargeError",
    "add",
    "add_many",
    "event",
    "event_of",
    "upcast",
]


def __getattr__(name: str) -> Any:
    # SQLAlchemy takes 0.2 s to import, and psycopg alone is enough for `add`.
    if name != "OutboxMessage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing("sqlalchemy"):
        from relay.outbox.orm import OutboxMessage  # noqa: PLC0415

    return OutboxMessage
