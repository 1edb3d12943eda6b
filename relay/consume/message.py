"""The message that a handler gets, as the relay sent it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Generic
from uuid import UUID, uuid5

import orjson
from aiormq.abc import DeliveredMessage
from typing_extensions import TypeVar

from relay.consume.cloudevents import unwrapped
from relay.outbox.declared import VERSION
from relay.outbox.identity import id_of_writer
from relay.servers.rabbitmq.content_header import UNDECODABLE

Payload_co = TypeVar("Payload_co", default=bytes, covariant=True)

WRITER = "x-outbox-writer"
WRAPPED = "x-outbox-cloudevents"  # the relay's envelope; one that a writer makes is the writer's affair
LONGEST_KEY = 2000  # bytes: PostgreSQL's indexes take 2,704 with the rest of the row; the outbox's own keys have 511
NO_DAY = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Message(Generic[Payload_co]):
    """An event. Its `message_id` identifies it: a repeat has the same id. Another writer may use the same id, too."""

    message_id: UUID
    type: str
    body: bytes
    aggregate_type: str | None  # together with aggregate_id the key: messages of one key come in order
    aggregate_id: str | None
    content_type: str | None
    timestamp: datetime | None
    routing_key: str
    redelivered: bool  # the broker has delivered it before, maybe to another consumer
    headers: Mapping[str, Any]
    consumer_name: str  # the consumer that applies it
    payload: Payload_co  # the body decoded by the handler's annotation, Message[Invoice]; else the body itself
    inbox_id: UUID | None = None  # the id by which the inbox knows it; None: message_id

    @property
    def version(self) -> str | None:
        """Return the text of the header `x-event-version`."""
        return _text(self.headers.get(VERSION))

    @property
    def writer(self) -> str | None:
        """Return the role that wrote it, from the relay's header; None: no role is known."""
        return _text(self.headers.get(WRITER))

    @property
    def identity(self) -> UUID:
        """Return the id by which the inbox knows it."""
        return self.inbox_id or self.message_id

    @property
    def day(self) -> date:
        """Return the day (UTC) on which it was written; the same for every repeat."""
        return NO_DAY if self.timestamp is None else self.timestamp.astimezone(UTC).date()

    @property
    def idempotency_key(self) -> str:
        """Return a UUID to pass to calls that have effects outside the database.

        It is the same for redeliveries and replays of this message, and another one for each consumer of it.
        """
        return str(uuid5(self.identity, self.consumer_name))

    def json(self) -> Any:
        """Return the body decoded from JSON; raises orjson.JSONDecodeError (a ValueError) when it is no JSON."""
        return orjson.loads(self.body)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message on its way through this consumer, with the delivery tag that acknowledges it."""

    tag: int
    key: str  # a message of a key begins only when the earlier ones are settled
    message: Message
    delivered: DeliveredMessage  # as it came, to make copies of it


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A delivery that cannot be a message of the outbox."""

    reason: str


def read_delivery(delivered: DeliveredMessage, consumer_name: str, *, by_writer: bool = False) -> Delivery | Unreadable:
    """Return the message of a delivery; `by_writer` separates writers that use the same message ids and keys."""
    properties = delivered.header.properties
    headers = properties.headers or {}
    if UNDECODABLE in headers:
        return Unreadable(f"it cannot be decoded: {_text(headers[UNDECODABLE])}")
    try:
        message_id = UUID(properties.message_id or "")
    except ValueError:
        return Unreadable(f"its message_id {properties.message_id!r} is no UUID")
    body, content_type = delivered.body, properties.content_type
    if WRAPPED in headers:
        try:
            body, content_type = unwrapped(body)
        except ValueError as error:
            return Unreadable(f"its CloudEvents envelope cannot be read: {error}")
    writer = _text(headers.get(WRITER)) if by_writer else None
    message = Message(
        message_id=message_id,
        type=properties.message_type or "",
        body=body,
        aggregate_type=_text(headers.get("x-aggregate-type")),
        aggregate_id=_text(headers.get("x-aggregate-id")),
        content_type=content_type,
        timestamp=properties.timestamp,
        routing_key=delivered.routing_key or "",
        redelivered=bool(delivered.redelivered),
        headers=headers,
        consumer_name=consumer_name,
        payload=body,
        inbox_id=None if writer is None else id_of_writer(message_id, writer),
    )
    # A message without an aggregate id needs no order: its id is its key.
    key = str(message.identity) if message.aggregate_id is None else f"{message.aggregate_type}/{message.aggregate_id}"
    if writer is not None and message.aggregate_id is not None:
        key = f"{writer}/{key}"
    # A message that fails is written to a table, and PostgreSQL's texts hold no NUL.
    for what, text in (
        ("key", key),
        ("type", message.type),
        ("exchange", delivered.exchange or ""),
        ("routing key", message.routing_key),
    ):
        if "\0" in text:
            return Unreadable(f"its {what} {text!r} holds a NUL")
    if (size := len(key.encode())) > LONGEST_KEY:
        return Unreadable(f"its key has {size} bytes; the table of held messages takes {LONGEST_KEY}")
    return Delivery(delivered.delivery_tag or 0, key, message, delivered)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
