"""The durable publisher for applications without an event loop: it runs in one, in a thread."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Self

from relay.errors import NotAcceptedError, UsageError
from relay.outbox.declared import Declared
from relay.outbox.events import Event
from relay.publisher.delivery_path import CLOSED
from relay.publisher.publisher import DurablePublisher
from relay.publisher.state import PublisherState
from relay.runtime.forks import Opened


class BlockingPublisher:
    """Publishes by a `DurablePublisher`, and waits: for Flask, Django, Celery and scripts. Threads may share it.

    It opens at the first `publish` of a process, or by `with`. So it may be made before a server forks its workers.
    `close` lets events that other threads publish be accepted. What was accepted before is safe without it.

    Args:
        publisher: not opened yet; only this object uses it. Workers may share its name, but no file.
    """

    def __init__(self, publisher: DurablePublisher) -> None:
        self._publisher = publisher
        self._opened = Opened(f"the blocking publisher {publisher.name!r}")
        self._lock = threading.RLock()  # a signal's handler may close it while the same thread opens it
        self._running: _Running | None = None
        self._is_closed = False

    def publish(self, event: Event | Declared) -> None:
        """Return when the event is accepted: confirmed by the broker, or committed in the buffer.

        Raises:
            EventError, NotAcceptedError: as `DurablePublisher.publish` does.
            DatabaseUnavailableError, SchemaError, AccessError, BusyError, BufferFileError: it cannot be opened; the
                next call tries again.
            ForkedError: this process is a fork of the one that opened it; nothing was sent.
            UsageError: the caller runs in an event loop, which would stand still.
        """
        self._refuse()
        with self._lock:  # no call may come behind the end of the loop
            loop = self._open()
            publishing = self._publisher.publish(event)
            try:
                accepted = asyncio.run_coroutine_threadsafe(publishing, loop)
            except RuntimeError:  # a signal's handler has closed it meanwhile
                publishing.close()
                raise NotAcceptedError(CLOSED) from None
        accepted.result()

    @property
    def state(self) -> PublisherState:
        """Return what the publisher does at this moment, and what hinders it."""
        return self._publisher.state

    def reload(self) -> None:
        """As `DurablePublisher.reload`."""
        self._publisher.reload()

    def close(self) -> None:
        """Take no more events, and return when all taken events are accepted, as `DurablePublisher.close` does.

        Raises:
            ForkedError: as `publish` does.
        """
        self._opened.refuse_fork()
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.end()

    def __enter__(self) -> Self:
        """Open the publisher. The broker need not be reachable.

        Raises:
            as `publish` does.
        """
        self._refuse()
        with self._lock:
            self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened.refusal is None:  # else the parent closes it
            self.close()

    def _open(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise NotAcceptedError(CLOSED)
        if self._running is None:
            self._opened.note()
            self._running = _Running(self._publisher)
        try:
            return self._running.wait_ready()
        except Exception:  # a signal may end the waiting by another error: then it is still being opened
            self._running = None
            raise

    def _refuse(self) -> None:
        """Raise what `publish` raises where it cannot wait."""
        self._opened.refuse_fork()
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise UsageError("a BlockingPublisher would block this event loop: use DurablePublisher in it")


class _Running:
    """A publisher that a thread opens, runs and closes."""

    def __init__(self, publisher: DurablePublisher) -> None:
        self._publisher = publisher
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._ended: Future[None] = Future()
        # A daemon: what was accepted is confirmed or in the buffer, so the process need not wait for it.
        threading.Thread(target=self._run, name=f"publisher {publisher.name}", daemon=True).start()

    def wait_ready(self) -> asyncio.AbstractEventLoop:
        """Return its event loop; raises what `DurablePublisher` raises when it cannot be opened."""
        return self._ready.result()[0]

    def end(self) -> None:
        """Close the publisher, and wait for it; calls that the loop has got before this one are still made."""
        try:
            loop, told = self._ready.result()
        except Exception:
            return
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(told.set)
        self._ended.result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            (self._ended if self._ready.done() else self._ready).set_exception(error)
        else:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        told = asyncio.Event()
        async with self._publisher:
            self._ready.set_result((asyncio.get_running_loop(), told))
            await told.wait()
