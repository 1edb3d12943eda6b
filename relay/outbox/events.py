"""The event that an application writes."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID, uuid4


class JsonModel(Protocol):
    """The part of pydantic's models that is used here, without an import of pydantic."""

    def model_dump_json(self) -> str: ...


Payload = bytes | str | dict[str, Any] | list[Any] | JsonModel


@dataclass(frozen=True, slots=True)
class Event:
    """One event, which the application writes in the transaction that makes it true.

    The fields are checked when the event is added: all events of a call are checked before the first is sent.

    `aggregate_type` and `aggregate_id` together are the ordering key: events of one key are delivered in the order in
    which they were written. Transactions that write one key at the same time have no order between them, unless they
    first lock a common row. With an `aggregate_id` of `None` the event has no order. An int or UUID stands
    for its text.

    The payload by its type and `content_type`, where `None` means `application/json`:
    - str or bytes with a JSON content type (`application/json`, `...+json`) is JSON text; it goes out byte for byte;
    - str (as UTF-8) or bytes with another content type goes out as these bytes, unchecked;
    - a dict or list is written as JSON by orjson, which takes datetimes, UUIDs and dataclasses, but no Decimal;
    - a pydantic model is written as JSON by its `model_dump_json`.

    `headers`: text, bool, 64-bit integers, finite floats, None, and lists and dicts of these.
    `exchange` and `routing_key`: None lets the relay's routes decide. Without a routing key, `aggregate_type` and
    `event_type` must fit into the default one, `<aggregate_type>.<event_type>`: 255 bytes.
    `available_at`: the relay does not send the event before this instant; it must have a time zone.
    `message_id`: the id by which consumers recognise a repeat.
    """

    aggregate_type: str
    aggregate_id: str | int | UUID | None
    event_type: str
    payload: Payload
    _: KW_ONLY
    headers: Mapping[str, Any] | None = None
    message_id: UUID = field(default_factory=uuid4)
    exchange: str | None = None
    routing_key: str | None = None
    content_type: str | None = None
    available_at: datetime | None = None
