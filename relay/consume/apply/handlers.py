"""The functions that an application has written: which handler applies which message, and how each is called.

The consumer acknowledges a message when its handler has returned. So a handler must not return work that is still to be
run. When a handler fails, the consumer must see an Exception, or the process must end. A pool calls its hooks in the
same way.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Set
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, TypeVar, overload

from relay.consume.apply.decoding import Decode, Subscription, decodes_of_older, read_decode
from relay.consume.apply.places import require_place
from relay.consume.message import Message
from relay.errors import ConfigurationError, HandlerAbortedError, HandlerCancelledError, HandlerResultError
from relay.outbox.awaited import EachBegun
from relay.outbox.declared import Declaration, declaration_of
from relay.servers.rabbitmq.connection import is_told_to_end

# What handlers get besides the message depends on the inbox.
AsyncHandler = Callable[[Message[Any], Any], Awaitable[None]] | Callable[[list[Message[Any]], Any], Awaitable[None]]
SyncHandler = Callable[[Message[Any], Any], None] | Callable[[list[Message[Any]], Any], None]
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])
Payload = TypeVar("Payload")
Place = TypeVar("Place")  # the connection or session
Result = TypeVar("Result")

EVERY_OTHER_TYPE = "*"
NO_VERSION = ""  # messages without the header; handlers without a version take every other version, too
MARK = "__outbox_handler__"
PARAMETERS = {"message": "the message or list", "connection": "the connection or session"}

# An iterator (a generator, a `map`) does nothing before it is read. The work of a future happens elsewhere.
UNFINISHED = (Iterator, AsyncIterator, futures.Future)


@overload
def on(
    declared: type[Payload], /, *, batch: Literal[False] = False
) -> Callable[[Callable[[Message[Payload], Place], Result]], Callable[[Message[Payload], Place], Result]]: ...
@overload
def on(
    declared: type[Payload], /, *, batch: Literal[True]
) -> Callable[
    [Callable[[list[Message[Payload]], Place], Result]], Callable[[list[Message[Payload]], Place], Result]
]: ...
@overload
def on(
    first: type[Any], second: type[Any], /, *more: type[Any], batch: bool = False
) -> Callable[[AnyHandler], AnyHandler]: ...
@overload
def on(
    *event_types: str, version: str | int | None = None, batch: bool = False
) -> Callable[[AnyHandler], AnyHandler]: ...
def on(*events: str | type[Any], version: str | int | None = None, batch: bool = False) -> Any:
    """Make a function the handler of these events; `on("*")` takes every type that no other handler takes.

    Args:
        events: event types; or classes that `relay.outbox.event` declares, whose instances the handler gets as
            `message.payload`. It takes the declared version, and older ones that `relay.outbox.upcast` leads to it.
        version: take only messages whose header `x-event-version` has this text. Without it, the handler takes every
            message of the type that no other handler takes.
        batch: the handler gets a list of the messages that follow each other in a transaction, in the order of
            delivery. One statement for the whole list costs a fraction of one statement for each message.

    The consumer calls `handler(message, connection)` inside an open transaction on that connection, in which it has
    already written the inbox row. The handler's changes are committed together with that row. The handler must not
    commit; it may use a savepoint (`connection.transaction()`). An exception rolls everything back, and the consumer
    tries the message again later.

    With the annotation `Message[Invoice]`, the consumer decodes the body into `message.payload` (docs/consumer.md).

    An `async def` gets a psycopg.AsyncConnection. A plain function runs in a thread and gets a psycopg.Connection.
    docs/consumer.md says what they get from an inbox with SQLAlchemy.
    """
    if not events or not all(map(_names_events, events)):
        raise ConfigurationError(
            '@on takes the event types of a handler, @on("InvoiceIssued"), or classes that @event declares'
        )
    if version is not None and EVERY_OTHER_TYPE in events:
        raise ConfigurationError(f'@on("*") takes every version: name the event types of version {version}')
    if version is not None and not all(isinstance(each, str) for each in events):
        raise ConfigurationError(f"@on of a class takes the version that @event declares, not version={version!r}")
    subscriptions = tuple(
        Subscription(each, None if version is None else str(version))
        if isinstance(each, str)
        else Subscription.of(each)
        for each in events
    )

    def mark(handler: AnyHandler) -> AnyHandler:
        setattr(handler, MARK, (subscriptions, batch))
        return handler

    return mark


def _names_events(given: object) -> bool:
    return bool(given) if isinstance(given, str) else declaration_of(given) is not None


@dataclass(frozen=True, slots=True)
class Handler:
    function: Callable[..., Any]
    takes_batch: bool
    decode: Decode | None


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of one consumer, found by event type and version. All are `async def`, or all are plain."""

    by_type: dict[str, dict[str | None, Handler]]  # by event type, then by version; None: every other version
    is_async: bool

    @property
    def event_types(self) -> list[str] | None:
        """Return the types that have a handler; None: every type has one."""
        return None if EVERY_OTHER_TYPE in self.by_type else sorted(self.by_type)

    def of_batches(self) -> list[str]:
        """Return the names of the handlers that take a list."""
        return sorted({name_of_function(each.function) for each in self._every() if each.takes_batch})

    def require_place(self, given: type) -> None:
        """Check that the handlers take what they get besides the message; raises ConfigurationError.

        A decorator's wrapper may pass on another thing, so the annotation of what it wraps says nothing.
        """
        for function in {id(each.function): each.function for each in self._every()}.values():
            if not any(hasattr(each, "__wrapped__") for each in (_without_partials(function), _code(function))):
                require_place(function, name_of_function(function), given)

    def _every(self) -> Iterator[Handler]:
        return (handler for versions in self.by_type.values() for handler in versions.values())

    def takes(self, message: Message) -> bool:
        return self._handler_of(message) is not None

    def calls(self, messages: Iterable[Message]) -> Iterator[tuple[Callable[..., Any], Message | list[Message]]]:
        """Yield the calls (function, first argument) that apply the messages, in order.

        For each of them, `takes` must have returned true.

        Raises:
            InvalidPayloadError: the body of the next message does not fit its handler.
        """
        for handler, neighbours in groupby(messages, self._handler_of):
            assert handler is not None, "`takes` has said yes"  # noqa: S101
            # Not by `map`: a StopIteration of a validator would end it, and leave out messages without a word. In this
            # generator Python makes a RuntimeError of it.
            decode = handler.decode or _as_it_came
            if handler.takes_batch:
                yield handler.function, [decode(message) for message in neighbours]
            else:
                for message in neighbours:
                    yield handler.function, decode(message)

    def _handler_of(self, message: Message) -> Handler | None:
        versions = self.by_type.get(message.type) or self.by_type.get(EVERY_OTHER_TYPE, {})
        handler = versions.get(None)
        if len(versions) > 1 or handler is None:  # else the header need not be read
            handler = versions.get(message.version or NO_VERSION, handler)
        return handler


def collect_handlers(functions: Iterable[AsyncHandler | SyncHandler]) -> Handlers:
    """Return the handlers by the types and versions given to `@on`, each with the payload type that it asks for.

    Raises:
        ConfigurationError: a function has no `@on`, is a generator, or has an annotation that cannot be read. Or there
            is no function, two take the same type and version, or sync and async are mixed. All messages of a
            transaction share one connection, and a connection is either sync or async.
    """
    by_type: dict[str, dict[str | None, Handler]] = {}
    declared: list[tuple[dict[str | None, Handler], Handler, Declaration]] = []
    kinds: dict[bool, str] = {}  # whether it is async, and the first that is so
    for function in functions:
        name = name_of_function(function)
        if not hasattr(function, MARK):
            raise ConfigurationError(f'{name} is no handler; put @on("<event type>") above it')
        require_callable(function, "handler", PARAMETERS)
        subscriptions, takes_batch = getattr(function, MARK)
        for subscription in subscriptions:
            handler = Handler(function, takes_batch, read_decode(function, name, subscription, takes_batch=takes_batch))
            versions = by_type.setdefault(subscription.event_type, {})
            if subscription.version in versions:
                what = f"event type {subscription.event_type!r}"
                what += "" if subscription.version is None else f" of version {subscription.version}"
                both = f"{name_of_function(versions[subscription.version].function)} and {name}"
                raise ConfigurationError(f"{what} has two handlers, {both}; keep one")
            versions[subscription.version] = handler
            if subscription.declaration is not None:
                declared.append((versions, handler, subscription.declaration))
        kinds.setdefault(is_async(function), name)
    for versions, handler, declaration in declared:  # after all: a handler of the older version itself goes first
        for version, decode in decodes_of_older(declaration):
            if version is not None or None not in versions:
                versions.setdefault(version or NO_VERSION, replace(handler, decode=decode))
    if not kinds:
        raise ConfigurationError("a consumer needs at least one handler")
    if len(kinds) == 2:
        raise ConfigurationError(
            "the handlers of one consumer are all `async def` or all plain functions, not both:"
            f" {kinds[True]} is an `async def`, {kinds[False]} is a plain function"
        )
    return Handlers(by_type, is_async=True in kinds)


def _as_it_came(message: Message) -> Message:
    return message


def name_of_function(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether the function is an `async def`, or a callable object, partial or decorator's wrapper around one."""
    return any(map(inspect.iscoroutinefunction, _layers(function)))


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether the function holds a `yield`, so that calling it runs nothing."""
    code = _code(function)
    return inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)


def require_callable(function: Callable[..., Any], kind: str, parameters: Mapping[str, str]) -> None:
    """Check that a call with as many arguments as `parameters` has runs the function.

    Args:
        parameters: the name of each argument, and what it is for.
    Raises:
        ConfigurationError: the function is a generator, or takes other arguments.
    """
    name = name_of_function(function)
    if is_generator(function):
        raise ConfigurationError(f"{name} cannot be a {kind}: calling it runs nothing, because it holds a `yield`")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        names, wanted = ", ".join(parameters), ", and one for ".join(parameters.values())
        raise ConfigurationError(f"{kind} {name} is called with ({names}): give it a parameter for {wanted}") from None


def call(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a plain function.

    Raises:
        HandlerResultError: the function returned work that is still to be run.
        HandlerCancelledError, HandlerAbortedError: it raised something that is no Exception, or that a thread cannot
            pass on.
        Exception: any other exception of the function.
    """
    try:
        _require_finished(function, _called(function, *arguments))
    except asyncio.CancelledError:
        raise HandlerCancelledError from None


async def call_async(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function, and await what it returns. Raises as `call` does, within `in_own_task`.

    Raises:
        NotAwaitedError: the function made a write to the outbox that was not begun.
    """
    with EachBegun():
        await _finish(function, _called(function, *arguments))


async def call_in_thread(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a thread, and await its result here: in the thread, an `async def` only makes a coroutine."""
    await _finish(function, await asyncio.to_thread(_called, function, *arguments))


async def in_own_task(calls: Coroutine[Any, Any, None]) -> None:
    """Await calls in a separate task, so that a handler that cancels its current task does not end the caller's.

    Raises:
        HandlerCancelledError: the calls were cancelled, but not by the consumer.
    """
    try:
        await asyncio.create_task(calls, name="consume.call")
    except asyncio.CancelledError:
        # Some libraries raise it when their own connection is lost (aio-pika does), without any cancellation.
        if is_told_to_end():
            raise
        raise HandlerCancelledError from None


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    with _as_exception():
        return function(*arguments)


async def _finish(function: Callable[..., Any], result: Any) -> None:
    with _as_exception():
        while inspect.isawaitable(result):
            result = await result
    _require_finished(function, result)


@contextmanager
def _as_exception() -> Iterator[None]:
    """Turn exceptions that would end the task or the thread into errors.

    A cancellation of our own task and the end of the process are raised as they are.
    """
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except futures.CancelledError:  # from a thread it would arrive as asyncio's, and end the task that waits for it
        raise HandlerCancelledError from None
    except StopIteration as error:  # a Future does not take it: the task would wait for the thread without end
        raise HandlerAbortedError(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise HandlerAbortedError(error) from error


def _require_finished(function: Callable[..., Any], result: object) -> None:
    # A callable result was not run. contextlib makes one of a generator; a class under @on returns an instance that may
    # be one.
    unfinished = [result] if callable(result) else list(_unfinished(result))
    for each in unfinished:
        if isinstance(each, Coroutine):
            each.close()  # else Python warns that the coroutine was never awaited
    if unfinished:
        raise HandlerResultError(name_of_function(function), type(unfinished[0]).__name__)


def _unfinished(result: object) -> Iterator[object]:
    """Yield the parts of a result that are still to be run: `[save(each) for each in messages]` may hold coroutines."""
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list | tuple | Set):
        for each in result:
            yield from _unfinished(each)
    elif isinstance(result, asyncio.Future) and result.done():
        if result.cancelled() or result.exception() is not None:
            yield result
        else:
            yield from _unfinished(result.result())
    elif isinstance(result, UNFINISHED):
        if not hasattr(result, "fetchmany"):  # a cursor or a result of SQLAlchemy has it: its statement was run
            yield result
    elif inspect.isawaitable(result):
        yield result


def _layers(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the code of the function, and the code of each function that it wraps (functools.wraps)."""
    layer: Any = function
    while layer is not None:
        yield _code(layer)
        layer = getattr(_without_partials(layer), "__wrapped__", None)


def _code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a partial or a callable object."""
    function = _without_partials(function)
    return function if inspect.isroutine(function) else type(function).__call__


def _without_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function
