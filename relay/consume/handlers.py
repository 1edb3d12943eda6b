"""Which function applies which message."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import psycopg

from relay.consume.message import Message
from relay.errors import ConfigurationError

AsyncHandler = (
    Callable[[Message, psycopg.AsyncConnection], Awaitable[None]]
    | Callable[[Sequence[Message], psycopg.AsyncConnection], Awaitable[None]]
)
SyncHandler = Callable[[Message, psycopg.Connection], None] | Callable[[Sequence[Message], psycopg.Connection], None]
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

EVERY_OTHER_TYPE = "*"
MARK = "__outbox_event_types__"


def on(*event_types: str, batch: bool = False) -> Callable[[AnyHandler], AnyHandler]:
    """Make a function the handler of these event types; `on("*")` takes every type that no other handler takes.

    The handler is called as `handler(message, connection)` inside an open transaction on that connection, in which
    the inbox row is already written: what it does there and the fact that it was done are committed together.
    It must not commit; a savepoint (`connection.transaction()`) is fine. An exception rolls everything back and
    the message is tried again later.

    With `batch` it is called with a list instead, of the messages that follow each other in a transaction: one
    statement for all of them costs a fraction of one each. The list is in the order of delivery.

    An `async def` gets a psycopg.AsyncConnection. A plain function runs in a thread and gets a psycopg.Connection.
    """
    if not event_types or not all(isinstance(name, str) and name for name in event_types):
        raise ConfigurationError('@on takes the event types of a handler: @on("InvoiceIssued")')

    def mark(handler: AnyHandler) -> AnyHandler:
        setattr(handler, MARK, (event_types, batch))
        return handler

    return mark


@dataclass(frozen=True, slots=True)
class Handler:
    function: Callable[..., Any]
    takes_batch: bool


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of one consumer, found by event type. All are `async def`, or none is."""

    by_type: dict[str, Handler]
    is_async: bool

    def takes(self, event_type: str) -> bool:
        return event_type in self.by_type or EVERY_OTHER_TYPE in self.by_type

    def calls(self, messages: Iterable[Message]) -> Iterator[tuple[Callable[..., Any], Message | list[Message]]]:
        """Give the calls (function, first argument) that apply messages of which `takes` said yes, in order."""
        for handler, neighbours in groupby(messages, self._handler_of):
            if handler.takes_batch:
                yield handler.function, list(neighbours)
            else:
                for message in neighbours:
                    yield handler.function, message

    def _handler_of(self, message: Message) -> Handler:
        return self.by_type.get(message.type) or self.by_type[EVERY_OTHER_TYPE]


def collect_handlers(functions: Iterable[AsyncHandler | SyncHandler]) -> Handlers:
    """Index handlers by the types given to `@on`.

    Raises:
        ConfigurationError: a function has no `@on`, two take one type, there is none, or sync and async are mixed:
            messages of one transaction must share one connection, and a connection is of one kind.
    """
    by_type: dict[str, Handler] = {}
    for function in functions:
        if not hasattr(function, MARK):
            raise ConfigurationError(f'{_name(function)} is no handler; put @on("<event type>") above it')
        event_types, takes_batch = getattr(function, MARK)
        for event_type in event_types:
            if event_type in by_type:
                both = f"{_name(by_type[event_type].function)} and {_name(function)}"
                raise ConfigurationError(f"event type {event_type!r} has two handlers, {both}; keep one")
            by_type[event_type] = Handler(function, takes_batch)
    kinds = {inspect.iscoroutinefunction(handler.function) for handler in by_type.values()}
    if not kinds:
        raise ConfigurationError("a consumer needs at least one handler")
    if len(kinds) == 2:
        raise ConfigurationError("the handlers of one consumer are all `async def` or all plain functions, not both")
    return Handlers(by_type, kinds.pop())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
