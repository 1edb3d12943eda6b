"""The durable publisher that applications open, and the tasks that run while it is open."""

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import inf
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from relay.config.secret import read_again
from relay.config.settings import BrokerSettings, DatabaseSettings, RelaySettings, Route, Settings, Url, settings_of
from relay.engine.send.broker_link import BrokerLink, WireFaultError
from relay.errors import ConfigurationError, NotAcceptedError
from relay.logger import get_logger
from relay.outbox.declared import Declared, event_of
from relay.outbox.errors import FieldError
from relay.outbox.events import Event
from relay.publisher.buffer import Buffer
from relay.publisher.delivery_path import DeliveryPath
from relay.publisher.embedded import RESTART_INITIAL, RESTART_MAX
from relay.publisher.entry import Unaccepted
from relay.publisher.file_buffer import FileBuffer
from relay.publisher.state import Mode, PublisherState
from relay.publisher.table_buffer import TableBuffer
from relay.runtime.backoff import backoff, wait_for_event
from relay.runtime.forks import Opened
from relay.runtime.health import Health
from relay.runtime.hindrance import Hindrance
from relay.runtime.stopping import GOODBYES

log = get_logger(__name__)

DATABASE_URL = re.compile("postgres(ql)?://")  # other text is the path of a file

START_WAIT, START_LOOK = 1.0, 0.02  # seconds for the broker, at the start


class DurablePublisher:
    """Publishes events outside any transaction; `async with` opens and closes it.

    An event is accepted when the broker has confirmed it. While the broker takes no events, an event is accepted when
    it is committed in the buffer. From there it is sent in order per key, with the same message_id and timestamp, even
    if this process has ended meanwhile.

    Args:
        buffer: the outbox's database, as a URL or DatabaseSettings; or the path of a file, for hosts without
            PostgreSQL. Only this publisher may use the file.
        broker: its URL, or BrokerSettings.
        name: the name of this publisher, the same after each restart: rows of this name in the table go first. Order
            per key holds within one process. Several publishers of one name only wait for each other's rows.
        routes, relay: the same as the relay's, so that both ways send to the same place in the same form. `relay` also
            sets how a file is drained, and the table if `embedded`.
        embedded: run a relay in this process, for deployments without `relay run`. Its name is `relay.node`.
    """

    def __init__(
        self,
        buffer: DatabaseSettings | Url | PathLike[str],
        *,
        broker: BrokerSettings | Url,
        name: str,
        routes: Sequence[Route] = (),
        relay: RelaySettings | None = None,
        embedded: bool = False,
    ) -> None:
        if not name or "\0" in name:
            raise ConfigurationError(f"a durable publisher needs a name, not empty and without NUL; not {name!r}")
        self.name = name
        relay = relay or RelaySettings()
        self._settings = Settings(broker=settings_of(BrokerSettings, broker), routes=tuple(routes), relay=relay)
        if isinstance(buffer, PathLike) or (isinstance(buffer, str) and not DATABASE_URL.match(buffer)):
            self._file: Path | None = Path(buffer)
        else:
            self._file = None
            self._settings = self._settings.model_copy(update={"database": settings_of(DatabaseSettings, buffer)})
        self._embedded = embedded
        self._health = Health(relay.stall_after)
        self._buffer: Buffer | None = None
        self._path: DeliveryPath | None = None
        self._running: AbstractAsyncContextManager[None] | None = None
        self._opened = Opened(f"the durable publisher {name!r}")

    def publish(self, event: Event | Declared) -> Coroutine[Any, Any, None]:
        """Return when the event is accepted: confirmed by the broker, or committed in the buffer.

        Events of several calls at once are sent together, and events of one key in the order of the calls. After a
        cancellation, the event may still be sent.

        Raises:
            EventError: the outbox would refuse the event; nothing was sent.
            ForkedError: this process is a fork of the one that opened the publisher; nothing was sent. The call raises
                it, not the coroutine: the event loop may run in a thread, which a fork does not have.
            NotAcceptedError: neither the broker nor the buffer took it within `database.command_timeout`, or the
                publisher is closed. The same event may be published again.
        """
        self._opened.refuse_fork()
        return self._publish(event)

    async def _publish(self, event: Event | Declared) -> None:
        if self._path is None or self._buffer is None:
            raise NotAcceptedError("the publisher is not open: use it by `async with`")
        if not isinstance(event, Event):
            event = event_of(event)
        if event.available_at is not None:
            raise FieldError(event, "available_at", "is for `relay.outbox.add`: a durable publisher sends at once")
        entry = Unaccepted.of(event, self._settings.relay.max_message_bytes, self._buffer.written_as)
        self._path.enter(entry)
        await entry.accepted

    @property
    def state(self) -> PublisherState:
        """Return what the publisher does at this moment, and what hinders it."""
        if (refusal := self._opened.refusal) is not None:
            return PublisherState(Mode.BUFFERED, 0, 0, 0, (str(refusal),))
        if (path := self._path) is None or self._buffer is None:
            return PublisherState(Mode.BUFFERED, 0, 0, 0, ("not open",))
        reasons = (*self._health.reasons, *self._buffer.reasons)
        return PublisherState(path.mode, path.waiting, path.confirmed, path.buffered, reasons)

    def reload(self) -> None:
        """Read again the URLs that come from files, for a handler of SIGHUP; the next connections use them.

        The log names a file that cannot be read or used (`secret.not_renewed`). Open connections stay.

        Raises:
            ForkedError: as `publish` does.
        """
        self._opened.refuse_fork()
        read_again(self._settings.broker.url, *([self._settings.database.url] if self._file is None else []))

    def close(self) -> Coroutine[Any, Any, None]:
        """Take no more events, and return when all taken events are accepted.

        Events in flight may be confirmed within `relay.drain_timeout`; the rest goes into the buffer. Events that the
        buffer does not take within `GOODBYES` are refused (`NotAcceptedError`) at the end of the block.

        Raises:
            ForkedError: as `publish` does.
        """
        self._opened.refuse_fork()
        return self._close()

    async def _close(self) -> None:
        if self._path is not None and self._buffer is not None:
            self._buffer.stop()
            await self._path.close(self._settings.relay.drain_timeout)

    async def __aenter__(self) -> Self:
        """Open the publisher. The broker need not be reachable.

        Raises:
            DatabaseUnavailableError, SchemaError, AccessError: the table cannot be used as the buffer.
            BusyError, BufferFileError: the file cannot be used as the buffer.
        """
        self._opened.note(asyncio.get_running_loop())
        self._running = self._run()
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened.refusal is not None:
            return  # the parent closes it
        assert self._running is not None, "it was entered"  # noqa: S101
        await self._running.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        buffer = self._buffer = self._make_buffer()
        try:
            await buffer.open()
            async with self._open_path(buffer):
                yield
        finally:
            await buffer.close()

    @asynccontextmanager
    async def _open_path(self, buffer: Buffer) -> AsyncIterator[None]:
        settings = self._settings
        closed = asyncio.Event()
        path = self._path = DeliveryPath(buffer, self._health, settings.broker.confirm_timeout)
        relay = settings.relay.model_copy(update={"node": f"publisher {self.name}"})
        named = settings.model_copy(update={"relay": relay})
        link = BrokerLink(named, path.direct, self._health, barring=True, start_timeout=inf)
        # A task, not a task group around the caller's block: the block's errors must reach the caller unchanged.
        working = asyncio.create_task(self._work(buffer, path, link, closed), name=f"publisher:{self.name}")
        try:
            await self._wait_for_broker(link)
            await path.begin()
            yield
        finally:
            clock = asyncio.get_running_loop().time
            end_by = clock() + settings.relay.drain_timeout + GOODBYES
            try:
                await self.close()
                closed.set()
                await asyncio.wait([working], timeout=max(0.0, end_by - clock()))
            finally:  # also when it is cancelled while it closes
                working.cancel()
                await asyncio.wait([working])
        if not working.cancelled():
            working.result()

    async def _wait_for_broker(self, link: BrokerLink) -> None:
        """Wait for up to `START_WAIT` seconds until there is a connection, or a reason why there is not."""
        until = asyncio.get_running_loop().time() + START_WAIT
        while not link.up.is_set() and not self._health.reasons and asyncio.get_running_loop().time() < until:
            await wait_for_event(link.up, START_LOOK)

    def _make_buffer(self) -> Buffer:
        if self._file is not None:
            return FileBuffer(self._file, self._settings)
        return TableBuffer(self._settings, self.name, embedded=self._embedded)

    async def _stay_linked(self, link: BrokerLink) -> None:
        """Keep the direct way open, also after a fault of ours; meanwhile events go to the buffer."""
        failures = 0
        while True:
            try:
                await link.run()
            except WireFaultError as fault:
                failures += 1
                log.error("publisher.failed", reason=str(fault), exc_info=fault)
                self._health.degrade("broker", Hindrance(f"a fault of the publisher: {fault}"))
                await asyncio.sleep(backoff(failures, RESTART_INITIAL, RESTART_MAX))

    async def _work(self, buffer: Buffer, path: DeliveryPath, link: BrokerLink, closed: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                works = {
                    "link": self._stay_linked(link),
                    "direct": path.direct.run(),
                    "write": path.write(),
                    "watch": path.watch(),
                }
                beside = [tasks.create_task(work, name=name) for name, work in works.items()]
                await buffer.run()  # drains it, until `close`
                await closed.wait()
                for task in beside:
                    task.cancel()
        finally:
            path.end()
