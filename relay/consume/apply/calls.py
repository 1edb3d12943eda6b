"""Call what the application has written, a handler or a hook, to its end.

A message is acknowledged when its handler has come back. So nothing may come back that is still to be run, and whatever
ends a handler has to reach us as an Exception, or as the end of the process.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from typing import Any

from relay.errors import HandlerAbortedError, HandlerCancelledError, HandlerResultError

# Nothing happens before somebody iterates over it, or it happens elsewhere. Not every iterator: cursors are some.
UNFINISHED = (Generator, AsyncGenerator, futures.Future, map)


def name_of_function(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is an `async def`, or a callable object, partial or decorator's wrapper around one."""
    return any(map(inspect.iscoroutinefunction, _layers(function)))


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether calling it runs nothing: it holds a `yield`."""
    code = _code(function)
    return inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)


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
    ours = asyncio.current_task()
    try:
        await asyncio.create_task(calls, name="consume.call")
    except asyncio.CancelledError:
        # Some libraries raise it when their own connection is lost (aio-pika does); nobody cancelled us.
        if ours is None or ours.cancelling():
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
    if inspect.isawaitable(result) or isinstance(result, UNFINISHED) or callable(result):
        if inspect.iscoroutine(result):
            result.close()  # else Python warns that nobody has awaited it
        raise HandlerResultError(name_of_function(function), type(result).__name__)


def _layers(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Give its code, and that of what it wraps (functools.wraps)."""
    layer: Any = function
    while layer is not None:
        yield _code(layer)
        layer = getattr(_without_partials(layer), "__wrapped__", None)


def _code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give the function behind a partial or a callable object."""
    function = _without_partials(function)
    return function if inspect.isroutine(function) else type(function).__call__


def _without_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function
