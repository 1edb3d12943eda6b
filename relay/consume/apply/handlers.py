"""The functions that an application has written: which handler applies which message, and how each is called.

A message is acknowledged when its handler has come back. So a handler may not return what must still be run. Whatever
ends a handler has to reach us as an Exception, or as the end of the process. A pool calls its hooks in the same way.
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

# What they get besides the message depends on the inbox.
AsyncHandler = Callable[[Message[Any], Any], Awaitable[None]] | Callable[[list[Message[Any]], Any], Awaitable[None]]
SyncHandler = Callable[[Message[Any], Any], None] | Callable[[list[Message[Any]], Any], None]
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

EVERY_OTHER_TYPE = "*"
MARK = "__outbox_handler__"
PARAMETERS = {"message": "the message or list", "connection": "the connection or session"}

# Nothing happens before the iterator is read (a generator, a `map`), or it happens elsewhere.
UNFINISHED = (Iterator, AsyncIterator, futures.Future)


def on(*event_types: str, version: str | int | None = None, batch: bool = False) -> Callable[[AnyHandler], AnyHandler]:
    """Make a function the handler of these event types; `on("*")` takes every type that no other handler takes.

    With `version` it takes only messages whose header `x-event-version` has this text. Without it, the handler takes
    every message of the type that no other handler takes.

    The handler is called as `handler(message, connection)` inside an open transaction on that connection, in which the
    inbox row is already written. What the handler does there is committed together with that row. It must not commit; a
    savepoint (`connection.transaction()`) is fine. An exception rolls everything back and the message is tried again
    later.

    With `batch` it is called with a list of the messages that follow each other in a transaction. One statement for all
    of them costs a fraction of one each. The list is in the order of delivery.

    `Message[Invoice]` as annotation has the body decoded into `message.payload` (docs/consumer.md).

    An `async def` gets a psycopg.AsyncConnection. A plain function runs in a thread and gets a psycopg.Connection.
    What they get of an inbox with SQLAlchemy: docs/consumer.md.
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

FAULTS_NAMED = 3


def read_decode(function: Callable[..., Any], name: str, *, takes_batch: bool) -> Decode | None:
    """Return what decodes the messages of this handler; None when it takes their bodies as they are.

    Raises:
        ConfigurationError: the annotation cannot be read, or is of something that nothing can be decoded into.
    """
    parameter = next(iter(inspect.signature(function).parameters.values()), None)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return None
    try:
        payload = _payload_type(_resolved(function, parameter.annotation), takes_batch=takes_batch)
        if payload is bytes:
            return None
        adapter = TypeAdapter(payload)
        adapter.rebuild()  # raises where a model waits for a name that is nowhere
    except (NameError, TypeError, AttributeError, SyntaxError, PydanticUserError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "Sequence[Message[Payload]]" if takes_batch else "Message[Payload]"
        raise ConfigurationError(
            f"handler {name}: {parameter} does not tell how messages are decoded ({reason}). Annotate it as {wanted},"
            " where Payload is a pydantic model, a dataclass or the like that can be imported at run time"
        ) from None
    return lambda message: _decode(adapter, message)


def _resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """Look up the names in one annotation: those of the others may be there for the type checker alone."""
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
        # Places and kinds; the words of pydantic, and of validators, repeat values of the payload.
        places = [(each["loc"], each["type"]) for each in error.errors(include_url=False, include_input=False)]
        faults = [f"{'.'.join(map(str, loc)) or 'body'}: {kind}" for loc, kind in places]
        raise InvalidPayloadError(message.type, message.message_id, _in_words(faults)) from None
    return replace(message, payload=payload)


def _in_words(faults: list[str]) -> str:
    more = len(faults) - FAULTS_NAMED
    return ", ".join([*faults[:FAULTS_NAMED], *([f"and {more} more"] if more > 0 else [])])


@dataclass(frozen=True, slots=True)
class Handler:
    function: Callable[..., Any]
    takes_batch: bool
    decode: Decode | None


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of one consumer, found by event type and version. All are `async def`, or all are plain."""

    by_type: dict[str, dict[str | None, Handler]]  # by version within; None: every other version
    is_async: bool

    @property
    def event_types(self) -> list[str] | None:
        """Return the types that have a handler; None: every type has one."""
        return None if EVERY_OTHER_TYPE in self.by_type else sorted(self.by_type)

    def of_batches(self) -> list[str]:
        """Return the names of those that take a list."""
        every = (handler for versions in self.by_type.values() for handler in versions.values())
        return sorted({name_of_function(each.function) for each in every if each.takes_batch})

    def takes(self, message: Message) -> bool:
        return self._handler_of(message) is not None

    def calls(self, messages: Iterable[Message]) -> Iterator[tuple[Callable[..., Any], Message | list[Message]]]:
        """Return the calls (function, first argument) that apply messages of which `takes` said yes, in order.

        Raises:
            InvalidPayloadError: the body of the next one does not fit its handler.
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
        if len(versions) > 1 or handler is None:  # else nobody needs to look into the headers
            handler = versions.get(message.version, handler)
        return handler


def collect_handlers(functions: Iterable[AsyncHandler | SyncHandler]) -> Handlers:
    """Index handlers by the types and versions given to `@on`, and read what payload each asks for.

    Raises:
        ConfigurationError: a function has no `@on`, is a generator, or has an annotation that cannot be read. Or there
            is no function, two take one type and version, or sync and async are mixed. Messages of one transaction must
            share one connection, and a connection is of one kind.
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
    """Whether it is an `async def`, or a callable object, partial or decorator's wrapper around one."""
    return any(map(inspect.iscoroutinefunction, _layers(function)))


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether calling it runs nothing: it holds a `yield`."""
    code = _code(function)
    return inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)


def require_callable(function: Callable[..., Any], kind: str, parameters: Mapping[str, str]) -> None:
    """Check that calling it with so many arguments runs it; `parameters` says what each is for.

    Raises:
        ConfigurationError: it is a generator, or takes other arguments.
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
        HandlerResultError: it returned what is still to be run.
        HandlerCancelledError, HandlerAbortedError: it raised what is no Exception, or what no thread can hand on.
        Exception: what it raised.
    """
    try:
        _require_finished(function, _called(function, *arguments))
    except asyncio.CancelledError:
        raise HandlerCancelledError from None


async def call_async(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function, and await what it returns. Raises as `call` does, within `in_own_task`."""
    await _finish(function, _called(function, *arguments))


async def call_in_thread(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a thread, and await here what it returns: an `async def` only begins there."""
    await _finish(function, await asyncio.to_thread(_called, function, *arguments))


async def in_own_task(calls: Coroutine[Any, Any, None]) -> None:
    """Await calls in a separate task: what cancels the current task in there does not end ours.

    Raises:
        HandlerCancelledError: they were cancelled, and not by us.
    """
    try:
        await asyncio.create_task(calls, name="consume.call")
    except asyncio.CancelledError:
        # Some libraries raise it when their own connection is lost (aio-pika does); nobody cancelled us.
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
    """Turn what no task and no thread outlives into an error; what means the process or our own task stays."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except futures.CancelledError:  # from a thread it would arrive as asyncio's, and end the task that waits there
        raise HandlerCancelledError from None
    except StopIteration as error:  # no Future takes it: the task would wait for the thread without end
        raise HandlerAbortedError(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise HandlerAbortedError(error) from error


def _require_finished(function: Callable[..., Any], result: object) -> None:
    # What contextlib makes of a generator can be called, as can a class's instance that was to be the handler.
    unfinished = [result] if callable(result) else list(_unfinished(result))
    for each in unfinished:
        if inspect.iscoroutine(each):
            each.close()  # else Python warns that nobody has awaited it
    if unfinished:
        raise HandlerResultError(name_of_function(function), type(unfinished[0]).__name__)


def _unfinished(result: object) -> Iterator[object]:
    """Yield what is still to be run of a result: `[save(each) for each in messages]` is a list of coroutines."""
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
        if not hasattr(result, "fetchmany"):  # a cursor, or a result of SQLAlchemy: its statement was run
            yield result
    elif inspect.isawaitable(result):
        yield result


def _layers(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Return its code, and that of what it wraps (functools.wraps)."""
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
