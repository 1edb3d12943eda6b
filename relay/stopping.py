"""End what runs when a signal says so."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def at_signals(call: Callable[[], None]) -> Iterator[None]:
    """Call at each SIGTERM and SIGINT; only in the main thread."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@contextmanager
def stopped_by_signals(stop: Callable[[], None], running: asyncio.Task[object]) -> Iterator[None]:
    """Call `stop` at SIGTERM or SIGINT, and cancel the task at a second one."""
    is_told = False

    def on_signal() -> None:
        nonlocal is_told
        if is_told:
            running.cancel()
        else:
            is_told = True
            stop()

    with at_signals(on_signal):
        yield
