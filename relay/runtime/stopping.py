"""End what runs when a signal says so."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from relay.logger import get_logger
from relay.runtime.backoff import cut_when

STOPS = (signal.SIGTERM, signal.SIGINT)
GOODBYE = 1.0  # seconds beyond the time to drain, to hand over and to close
GOODBYES = 2.0  # for everything that a process has open

log = get_logger(__name__)


@contextmanager
def at_signals(stop: Callable[[signal.Signals], None], *, reload: Callable[[], None] | None) -> Iterator[None]:
    """Call `stop` at each SIGTERM and SIGINT, and `reload` at each SIGHUP, unless it is `None`; main thread only."""
    with ExitStack() as stack:
        for number in STOPS:
            stack.enter_context(at_signal(number, partial(stop, number)))
        if reload is not None:
            stack.enter_context(at_signal(signal.SIGHUP, reload))
        yield


@contextmanager
def at_signal(number: signal.Signals, call: Callable[[], None]) -> Iterator[None]:
    """Call at each such signal; main thread only. One that was ignored before is ignored again in the end."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(number)
    loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)
        if before is signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def shared_signals(stop: Callable[[], None], *, reload: Callable[[], None], wanted: bool | None) -> Iterator[None]:
    """Call `stop` at each SIGTERM and SIGINT, and `reload` at each SIGHUP, as a part of an application.

    Who has asked before is called, too, and so is the application's own handler.

    Args:
        wanted: main thread only. `None`: in the task of `asyncio.run` all are taken. In another task those are left
            alone that other code handles, such as a web server. In another thread all are.
    """
    calls = {**dict.fromkeys(STOPS, stop), signal.SIGHUP: reload}
    if wanted is None:
        is_main = _is_main_task()
        calls = {number: call for number, call in calls.items() if is_main or _is_free(number)}
    with ExitStack() as stack:
        for number, call in calls.items() if wanted is not False else ():
            stack.enter_context(_listening(number, call))
        yield


@dataclass(slots=True, eq=False)
class _Listeners:
    """The handler of a signal for several callers.

    It is one of `signal` and not of the loop, which has one for each signal. The loop calls its own all the same: it
    learns of signals by a file descriptor.
    """

    before: Any  # what `signal.getsignal` has returned
    calls: list[Callable[[], object]] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for call in self.calls:
            call()
        if callable(self.before) and not _is_pythons(self.before):
            self.before(number, frame)


@contextmanager
def _listening(number: signal.Signals, call: Callable[[], None]) -> Iterator[None]:
    listeners: Any = signal.getsignal(number)
    if not isinstance(listeners, _Listeners):
        listeners = _Listeners(listeners)
        signal.signal(number, listeners)
    call_soon = partial(asyncio.get_running_loop().call_soon_threadsafe, call)
    listeners.calls.append(call_soon)
    try:
        yield
    finally:
        listeners.calls.remove(call_soon)
        if not listeners.calls and signal.getsignal(number) == listeners:
            signal.signal(number, listeners.before)


def _give_back() -> None:
    """Let a fork have each signal as it was before, as the loop that would be told does not run there."""
    for number in (*STOPS, signal.SIGHUP):
        listeners: Any = signal.getsignal(number)
        if isinstance(listeners, _Listeners):
            signal.signal(number, listeners.before)


os.register_at_fork(after_in_child=_give_back)


def _is_main_task() -> bool:
    """Whether the current task is that of `asyncio.run`, whose handler of SIGINT knows it."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Listeners):
        handler = handler.before
    return isinstance(handler, partial) and handler.keywords.get("main_task") is asyncio.current_task()


def _is_free(number: signal.Signals) -> bool:
    """Whether no code but ours handles it."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(number)
    return isinstance(handler, signal.Handlers | _Listeners) or _is_pythons(handler)


def _is_pythons(handler: object) -> bool:
    """Whether it is Python's own: that of the start, or that of `asyncio.run`, which cancels the main task."""
    if isinstance(handler, partial):
        handler = handler.func
    return handler is signal.default_int_handler or isinstance(getattr(handler, "__self__", None), asyncio.Runner)


@contextmanager
def stopped_by_signals(
    stop: Callable[[signal.Signals], None],
    running: asyncio.Task[object],
    *,
    interrupt: Callable[[], None] = lambda: None,
    reload: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Call `stop` at SIGTERM or SIGINT, and cancel the task at a second one; call `reload` at SIGHUP.

    Args:
        interrupt: called just before the task is cancelled.
    """
    is_told = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal is_told
        if is_told:
            interrupt()
            running.cancel()
        else:
            is_told = True
            stop(number)

    with at_signals(on_signal, reload=reload):
        yield


@asynccontextmanager
async def cut_after(told: asyncio.Event, drain_timeout: float) -> AsyncIterator[None]:
    """Cancel the block, and leave it, `GOODBYES` after the time to drain, which begins when `told` is set."""
    try:
        async with cut_when(told, drain_timeout + GOODBYES) as whole:
            yield
    except TimeoutError:
        if not whole.expired():
            raise
        log.warning("stop.timed_out")


@asynccontextmanager
async def ending_in_time(told: asyncio.Event, drain_timeout: float) -> AsyncIterator[None]:
    """End the process with 0 `GOODBYES` after the time to drain, which begins when `told` is set.

    The last resort: what waits in a thread, such as for a name server, cannot be interrupted. And a process that ends
    in order waits for its threads. Nothing is lost by it: the tables have what is left to do.
    """

    async def watch() -> None:
        await told.wait()
        timer = threading.Timer(drain_timeout + GOODBYES, _end)
        timer.daemon = True
        timer.start()

    watching = asyncio.create_task(watch(), name="last resort")
    try:
        yield
    finally:
        watching.cancel()


def _end() -> None:
    log.warning("stop.timed_out")
    os._exit(0)
