"""The errors of the outbox, raised before anything is sent to the database.

EventError (relay.errors)
  FieldError              a field has a wrong type, is empty or too long, or PostgreSQL or AMQP cannot store it
  HeaderError             a header that AMQP cannot carry
  PayloadError            a payload that does not fit its content type
    PayloadTooLargeError
NoTransactionError (OutboxError)
NotAwaitedError (OutboxError)

An EventError names the event by its type and key, never by its payload.
"""

from reprlib import repr as shortened
from typing import TYPE_CHECKING

from relay.errors import EventError, OutboxError

if TYPE_CHECKING:
    from relay.outbox.events import Event

__all__ = [
    "EventError",
    "FieldError",
    "HeaderError",
    "NoTransactionError",
    "NotAwaitedError",
    "PayloadError",
    "PayloadTooLargeError",
]


class FieldError(EventError):
    """A field of the event that the table or AMQP cannot hold."""

    def __init__(self, event: "Event", field: str, problem: str) -> None:
        super().__init__(f"{_named(event)}: {field} {problem}")
        self.event = event
        self.field = field


class HeaderError(EventError):
    """A header that AMQP cannot carry; `header` is its path, as in `headers.retries[2]`."""

    def __init__(self, event: "Event", header: str, problem: str) -> None:
        super().__init__(f"{_named(event)}: {header} {problem}")
        self.event = event
        self.header = header


class PayloadError(EventError):
    """A payload that does not fit its content type; `path` is the value's place, as in `payload.lines[2].price`."""

    def __init__(self, event: "Event", problem: str, path: str = "payload") -> None:
        super().__init__(f"{_named(event)}: {path} {problem}")
        self.event = event
        self.path = path


class PayloadTooLargeError(PayloadError):
    """A payload that the relay would not send."""

    def __init__(self, event: "Event", size: int, limit: int) -> None:
        super().__init__(event, f"has {size} bytes; the limit is {limit} (max_payload_bytes)")
        self.size = size
        self.limit = limit


class NoTransactionError(OutboxError):
    """Events for a connection in autocommit mode, outside of a transaction; nothing was sent to the database."""

    def __init__(self, *, may_autocommit: bool = True) -> None:
        allowed, refused = "Or pass autocommit=True", "This test's require_transaction() allows no autocommit"
        super().__init__(
            "no transaction is open, and the connection is in autocommit mode: the event would be committed even if"
            " the change that it reports fails. Begin a transaction first (psycopg: `connection.transaction()`,"
            " Django: `transaction.atomic()`, SQLAlchemy: an engine without AUTOCOMMIT)."
            f" {allowed if may_autocommit else refused}"
        )


class NotAwaitedError(OutboxError):
    """Events for an asynchronous connection that were never written: the application did not await the write."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}: no event was written: write `await add(...)` for an asynchronous connection")
        self.file = file
        self.line = line


def _named(event: "Event") -> str:
    return f"event {shortened(event.event_type)} of {shortened(event.aggregate_type)} {shortened(event.aggregate_id)}"
