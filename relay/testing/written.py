"""A row that an application wrote, decoded for its tests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar, overload
from uuid import UUID

from relay.errors import importing
from relay.outbox.declared import is_declared
from relay.outbox.events import Event
from relay.outbox.row import NewRow, row_of

T = TypeVar("T")

MOST_DIGITS = 4300
LONGEST = 200  # characters of a value in a message of an assertion
PLAIN = (dict, list, str, int, float, bool)  # what JSON is without a model


@dataclass(frozen=True, eq=False)
class Written:
    """One row of the outbox.

    It equals an `Event`, or an instance of a declared class, that has the same content, whatever its `message_id`.

    Attributes:
        key: `aggregate_type` and `aggregate_id`.
        body: JSON as it was written, or the bytes of a payload that is no JSON.
        state: as in the table, such as `pending`; None for what `capture` saw.
    """

    event_type: str
    key: tuple[str, str | None]
    headers: Mapping[str, Any]
    message_id: UUID
    exchange: str | None
    routing_key: str | None
    content_type: str | None
    available_at: datetime | None
    body: str | bytes
    state: str | None

    @overload
    def payload(self) -> Any: ...
    @overload
    def payload(self, as_: type[T]) -> T: ...
    def payload(self, as_: type[Any] | None = None) -> Any:
        """Return the payload: JSON decoded, or the bytes of one that is no JSON.

        Args:
            as_: the type to return. A model, dataclass or TypedDict is validated by pydantic.
        Raises:
            TypeError: the payload is of another type.
            pydantic.ValidationError: it does not fit the model.
        """
        if as_ is None or as_ in PLAIN or as_ is bytes:
            payload = self.body if isinstance(self.body, bytes) else decoded(self.body)
            if as_ is not None and type(payload) is not as_:
                raise TypeError(f"the payload of {self} is a {type(payload).__name__}, no {as_.__name__}")
            return payload
        if isinstance(self.body, bytes):
            raise TypeError(f"the payload of {self} is bytes, no JSON for {as_.__name__}")
        with importing("testing"):
            from pydantic import TypeAdapter  # noqa: PLC0415

        return TypeAdapter(as_).validate_json(self.body)

    def __eq__(self, other: object) -> bool:
        match other:
            case Written():
                return self.message_id == other.message_id and self._content() == other._content()
            case _ if isinstance(other, Event) or is_declared(other):
                return self._content() == given(row_of(other, None))._content()  # type: ignore[arg-type]  # one of them
            case _:
                return NotImplemented

    def __hash__(self) -> int:
        return hash(self.message_id)

    def __str__(self) -> str:
        kind, key = self.key
        named = self.event_type + (f" of {kind}" if key is None else f" of {kind} {key}")
        return f"{named}: {_cut(repr(self.body) if isinstance(self.body, bytes) else self.body)}"

    def _content(self) -> tuple[Any, ...]:
        body = self.body if isinstance(self.body, bytes) else decoded(self.body)
        place = (self.exchange, self.routing_key, self.content_type, self.available_at)
        return (self.event_type, self.key, dict(self.headers), *place, body)


def given(row: NewRow) -> Written:
    """Return what a writer was given, which may be rolled back."""
    return Written(
        event_type=row.event_type,
        key=(row.aggregate_type, row.aggregate_id),
        headers=json.loads(row.headers or "{}"),
        message_id=row.message_id,
        exchange=row.exchange,
        routing_key=row.routing_key,
        content_type=row.content_type,
        available_at=row.available_at,
        body=row.payload if row.payload_bytes is None else row.payload_bytes,  # type: ignore[arg-type]  # one is there
        state=None,
    )


def decoded(text: str) -> Any:
    """Return what JSON says; an integer that Python does not read at once becomes a Decimal."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= MOST_DIGITS else Decimal(digits))


def short(value: object) -> str:
    """Return what a message of an assertion shows of a value."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
