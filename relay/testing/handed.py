"""The message that a consumer hands to a handler, for a test that calls the handler itself."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from relay.consume.apply.handlers import collect_handlers, name_of_function, on
from relay.consume.message import Message, Unreadable, read_delivery
from relay.errors import MessageError
from relay.outbox.declared import Declared, is_declared
from relay.outbox.events import Event
from relay.outbox.row import row_of
from relay.testing.memory import message_of, relays_encoder
from relay.testing.written import Written, given


def message(
    event: Event | Declared | Written,
    *,
    handler: Callable[..., Any] | None = None,
    consumer_name: str = "test",
    redelivered: bool = False,
    timestamp: datetime | None = None,
) -> Message[Any]:
    """Return the message that a handler would get of this event, by a relay without routes and by a consumer.

    Args:
        handler: with `@on`: its annotation or class says what the payload is. Without it, the payload of an instance of
            a declared class is such an instance, and any other the body.
        consumer_name, redelivered: as the message has them.
        timestamp: when the event was written; None: now.
    Raises:
        EventError, UnsendableError, MessageError: the outbox, the relay or the consumer would refuse the event.
        InvalidPayloadError: the payload does not fit the handler, which a consumer would not call.
        ValueError: the handler does not take this type or version.
    """
    row = event if isinstance(event, Written) else given(row_of(event, None))
    read = read_delivery(message_of(row, 1, relays_encoder()).delivered(1), consumer_name)
    if isinstance(read, Unreadable):
        raise MessageError(read.reason)
    found = replace(read.message, redelivered=redelivered, timestamp=timestamp or read.message.timestamp)
    if handler is None and is_declared(event):
        handler = _handler_of(type(event))
    return found if handler is None else _decoded(found, handler)


def _handler_of(kind: type[Any]) -> Callable[..., Any]:
    @on(kind)
    def take(message: Any, connection: Any) -> None: ...

    return take


def _decoded(found: Message, handler: Callable[..., Any]) -> Message[Any]:
    handlers = collect_handlers([handler])
    if not handlers.takes(found):
        version = f" of version {found.version}" if found.version else ""
        raise ValueError(f"{name_of_function(handler)} does not take {found.type}{version}")
    ((_, argument),) = handlers.calls([found])
    return argument[0] if isinstance(argument, list) else argument
