"""Which function applies which message."""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg

from relay.consume.message import Message
from relay.errors import ConfigurationError

AsyncHandler = Callable[[Message, psycopg.AsyncConnection], Awaitable[None]]
SyncHandler = Callable[[Message, psycopg.Connection], None]
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

EVERY_OTHER_TYPE = "*"
MARK = "__outbox_event_types__"


def on(*event_types: str) -> Callable[[AnyHandler], AnyHandler]:
    """Make a function the handler of these event types; `on("*")` takes every type that no other handler takes.

    The handler is called as `handler(message, connection)` inside an open transaction on that connection, in which
    the inbox row is already written: what it does there and the fact that it was done are committed together.
    It must not commit; a savepoint (`connection.transaction()`) is fine. An exception rolls everything back and
    the message is tried again later.

    An `async def` gets a psycopg.AsyncConnection. A plain function runs in a thread and gets a psycopg.Connection.
    """
    if not event_types or not all(isinstance(name, str) and name for name in event_types):
        raise ConfigurationError('@on takes the event types of a handler: @on("InvoiceIssued")')

    def mark(handler: AnyHandler) -> AnyHandler:
        setattr(handler, MARK, event_types)
        return handler

    return mark


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of one consumer, found by event type. All are `async def`, or none is."""

    by_type: dict[str, Callable[..., Any]]
    is_async: bool

    def takes(self, event_type: str) -> bool:
        return event_type in self.by_type or EVERY_OTHER_TYPE in self.by_type

    def by_type_of(self, message: Message) -> Callable[..., Any]:
        """Give the handler of a message of which `takes` said yes."""
        return self.by_type.get(message.type) or self.by_type[EVERY_OTHER_TYPE]


def collect_handlers(functions: Iterable[AsyncHandler | SyncHandler]) -> Handlers:
    """Index handlers by the types given to `@on`.

    Raises:
        ConfigurationError: a function has no `@on`, two take one type, there is none, or sync and async are mixed:
            messages of one transaction must share one connection, and a connection is of one kind.
    """
    by_type: dict[str, Callable[..., Any]] = {}
    for function in functions:
        for event_type in getattr(function, MARK, ()):
            if event_type in by_type:
                raise ConfigurationError(
                    f"event type {event_type!r} has two handlers, {_name(by_type[event_type])} and {_name(function)};"
                    " keep one"
                )
            by_type[event_type] = function
        if not hasattr(function, MARK):
            raise ConfigurationError(f'{_name(function)} is no handler; put @on("<event type>") above it')
    kinds = {inspect.iscoroutinefunction(handler) for handler in by_type.values()}
    if not kinds:
        raise ConfigurationError("a consumer needs at least one handler")
    if len(kinds) == 2:
        raise ConfigurationError("the handlers of one consumer are all `async def` or all plain functions, not both")
    return Handlers(by_type, kinds.pop())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
