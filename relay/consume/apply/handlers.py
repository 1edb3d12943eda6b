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
from types import SimpleNamespace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from relay.consume.message import Message
from relay.errors import (
    ConfigurationError,
    HandlerAbortedError,
    HandlerCancelledError,
    HandlerResultError,
    InvalidPayloadError,
)
from relay.servers.rabbitmq.connection import is_told_to_end

# What handlers get besides the message depends on the inbox.
AsyncHandler = Callable[[Message[Any], Any], Awaitable[None]] | Callable[[list[Message[Any]], Any], Awaitable[None]]
SyncHandler = Callable[[Message[Any], Any], None] | Callable[[list[Message[Any]], Any], None]
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

EVERY_OTHER_TYPE = "*"
MARK = "__outbox_handler__"
PARAMETERS = {"message": "the message or list", "connection": "the connection or session"}

# An iterator (a generator, a `map`) does nothing before it is read. The work of a future happens elsewhere.
UNFINISHED = (Iterator, AsyncIterator, futures.Future)


def on(*event_types: str, version: str | int | None = None, batch: bool = False) -> Callable[[AnyHandler], AnyHandler]:
    """Make a function the handler of these event types; `on("*")` takes every type that no other handler takes.

    With `version` it takes only messages whose header `x-event-version` has this text. Without it, the handler takes
    every message of the type that no other handler takes.

    The consumer calls `handler(message, connection)` inside an open transaction on that connection, in which it has
    already written the inbox row. The handler's changes are committed together with that row. The handler must not
    commit; it may use a savepoint (`connection.transaction()`). An exception rolls everything back, and the consumer
    tries the message again later.

    With `batch` the handler gets a list of the messages that follow each other in a transaction, in the order of
    delivery. One statement for the whole list costs a fraction of one statement for each message.

    With the annotation `Message[Invoice]`, the consumer decodes the body into `message.payload` (docs/consumer.md).

    An `async def` gets a psycopg.AsyncConnection. A plain function runs in a thread and gets a psycopg.Connection.
    docs/consumer.md says what they get from an inbox with SQLAlchemy.
    """
    if not event_types or not all(isinstance(name, str) and name for name in event_types):
        raise ConfigurationError('@on takes the event types of a handler: @on("InvoiceIssued")')
    if version is not None and EVERY_OTHER_TYPE in event_types:
        raise ConfigurationError(f'@on("*") takes every version: name the event types of version {version}')

    def mark(handler: AnyHandler) -> AnyHandler:
        setattr(handler, MARK, (event_types, None if version is None else str(version), batch))
        return handler

    return mark


Decode = Callable[[Message], Message[Any]]

FAULTS_TOLD = 3


def read_decode(function: Callable[..., Any], name: str, *, takes_batch: bool) -> Decode | None:
    """Return the function that decodes the messages of this handler; None when it takes the bodies as they are.

    Raises:
        ConfigurationError: the annotation cannot be read, or names a type that no body can be decoded into.
    """
    parameter = next(iter(inspect.signature(function).parameters.values()), None)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return None
    try:
        payload = _payload_type(_resolved(function, parameter.annotation), takes_batch=takes_batch)
        if payload is bytes:
            return None
        adapter = TypeAdapter(payload)
        adapter.rebuild()  # raises when a model refers to a name that is not defined
    except (NameError, TypeError, AttributeError, SyntaxError, PydanticUserError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "Sequence[Message[Payload]]" if takes_batch else "Message[Payload]"
        raise ConfigurationError(
            f"handler {name}: {parameter} does not say how to decode messages ({reason}). Annotate it as {wanted},"
            " where Payload is a pydantic model, a dataclass or a similar class that can be imported at run time"
        ) from None
    return lambda message: _decode(adapter, message)


def _resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """Look up the names in this one annotation. Other annotations may name types that only the type checker imports."""
    holder = SimpleNamespace(__annotations__={"message": annotation})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return get_type_hints(holder, names, include_extras=True)["message"]


def _payload_type(annotation: Any, *, takes_batch: bool) -> Any:
    if takes_batch and annotation is not Any:
        origin = get_origin(annotation) or annotation
        if not (isinstance(origin, type) and issubclass(list, origin)):
            raise TypeError("with batch=True it is called with a list")
        (annotation,) = get_args(annotation) or (Any,)
    if annotation in (Any, Message):
        return bytes
    if get_origin(annotation) is not Message:
        raise TypeError("it is called with a Message")
    return get_args(annotation)[0]


def _decode(adapter: TypeAdapter[Any], message: Message) -> Message[Any]:
    try:
        payload = adapter.validate_json(message.body)
    except ValidationError as error:
        # Only places and kinds: the messages of pydantic and of validators repeat values of the payload.
        places = [(each["loc"], each["type"]) for each in error.errors(include_url=False, include_input=False)]
        faults = [f"{'.'.join(map(str, loc)) or 'body'}: {kind}" for loc, kind in places]
        raise InvalidPayloadError(message.type, message.message_id, _told(faults)) from None
    return replace(message, payload=payload)


def _told(faults: list[str]) -> str:
    more = len(faults) - FAULTS_TOLD
    return ", ".join([*faults[:FAULTS_TOLD], *([f"and {more} more"] if more > 0 else [])])


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
        every = (handler for versions in self.by_type.values() for handler in versions.values())
        return sorted({name_of_function(each.function) for each in every if each.takes_batch})

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
            decoded = map(handler.decode, neighbours) if handler.decode else neighbours  # noqa: B031 (one of the two)
            if handler.takes_batch:
                yield handler.function, list(decoded)
            else:
                for message in decoded:
                    yield handler.function, message

    def _handler_of(self, message: Message) -> Handler | None:
        versions = self.by_type.get(message.type) or self.by_type.get(EVERY_OTHER_TYPE, {})
        handler = versions.get(None)
        if len(versions) > 1 or handler is None:  # else the header need not be read
            handler = versions.get(message.version, handler)
        return handler


def collect_handlers(functions: Iterable[AsyncHandler | SyncHandler]) -> Handlers:
    """Return the handlers by the types and versions given to `@on`, each with the payload type that it asks for.

    Raises:
        ConfigurationError: a function has no `@on`, is a generator, or has an annotation that cannot be read. Or there
            is no function, two take the same type and version, or sync and async are mixed. All messages of a
            transaction share one connection, and a connection is either sync or async.
    """
    by_type: dict[str, dict[str | None, Handler]] = {}
    kinds = set()
    for function in functions:
        name = name_of_function(function)
        if not hasattr(function, MARK):
            raise ConfigurationError(f'{name} is no handler; put @on("<event type>") above it')
        require_callable(function, "handler", PARAMETERS)
        event_types, version, takes_batch = getattr(function, MARK)
        handler = Handler(function, takes_batch, read_decode(function, name, takes_batch=takes_batch))
        for event_type in event_types:
            versions = by_type.setdefault(event_type, {})
            if version in versions:
                what = f"event type {event_type!r}" + ("" if version is None else f" of version {version}")
                both = f"{name_of_function(versions[version].function)} and {name}"
                raise ConfigurationError(f"{what} has two handlers, {both}; keep one")
            versions[version] = handler
        kinds.add(is_async(function))
    if not kinds:
        raise ConfigurationError("a consumer needs at least one handler")
    if len(kinds) == 2:
        raise ConfigurationError("the handlers of one consumer are all `async def` or all plain functions, not both")
    return Handlers(by_type, kinds.pop())


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
    """Call a function, and await what it returns. Raises as `call` does, within `in_own_task`."""
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
        if inspect.iscoroutine(each):
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
