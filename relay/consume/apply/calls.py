"""Call what the application has written, a handler or a hook, to its end.

A message is acknowledged when its handler has come back. So nothing may come back that is still to be run, and whatever
ends a handler has to reach us as an Exception, or as the end of the process.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Set
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from typing import Any

from relay.broker.connection import is_told_to_end
from relay.errors import ConfigurationError, HandlerAbortedError, HandlerCancelledError, HandlerResultError

# Nothing happens before the iterator is read (a generator, a `map`), or it happens elsewhere.
UNFINISHED = (Iterator, AsyncIterator, futures.Future)


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
    """Await calls in a task of their own: what cancels the current task in there does not end ours.

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
    except StopIteration as error:  # no Future takes it: the task would wait for the thread for ever
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
