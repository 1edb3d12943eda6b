"""Calls that cannot be interrupted, such as those that wait for a name server or a connection."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


async def call_in_daemon(
    function: Callable[[], Result], *, name: str, discard: Callable[[Result], object] = lambda _: None
) -> Result:
    """Return the result of a call in a separate daemon thread.

    A call that hangs neither occupies a thread of the pool nor delays the exit.

    Args:
        name: of the thread.
        discard: closes a result that came after the caller was cancelled.
    """
    called: Future[Result] = Future()
    called.set_running_or_notify_cancel()  # so that a caller that gives up cannot cancel it

    def call() -> None:
        try:
            called.set_result(function())
        except BaseException as error:  # the caller that waits gets it
            called.set_exception(error)

    def close(ended: Future[Result]) -> None:
        if ended.exception() is None:
            discard(ended.result())

    Thread(target=copy_context().run, args=(call,), name=name, daemon=True).start()
    try:
        return await asyncio.wrap_future(called)
    except asyncio.CancelledError:
        called.add_done_callback(close)  # in the thread, or at once if the result was on its way
        raise
