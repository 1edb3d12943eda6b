"""Drain a file: its rows go to the broker in order per key, and are deleted after their confirm.

file ──rows──> publisher ──frames──> broker
  ^               │ <──confirms────────┘
  └──forget, hold─┘ settled rows

The publisher is the engine's. If the broker refuses a row because of its content or its address, the row is tried
again, alone, without a limit. Each wait is longer than the one before. The later rows of its key wait in the file.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from relay.config.settings import KeyPolicy, Ordering, Settings, Unroutable
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.row import Fault, Row
from relay.engine.send.routes import Router
from relay.engine.send.sender import Sender
from relay.errors import BufferFileError, NotAcceptedError
from relay.logger import get_logger
from relay.publisher.buffer import Left
from relay.publisher.entry import Entry
from relay.publisher.file import File, Stored
from relay.runtime.backoff import backoff, wait_for_event

log = get_logger(__name__)

ROWS_PER_READ = 500
TRIED_AT_ONCE = 50  # refused rows that are tried together: they must not fill the window
LOOK_INTERVAL = 0.5  # seconds within which refused rows that are due are found
RETRY_INITIAL, RETRY_MAX = 0.1, 10.0  # seconds, when the file fails
REASONS_TOLD = 10


class FileBuffer:
    """A file as the buffer, and the drain of its rows.

    Attributes:
        publisher: has the rows that were read; a link attaches its wire to it.
        written_as: see `Buffer`; empty, as a file has no roles.
    """

    written_as = b""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._file = File(path)
        self._settings = settings.relay
        self._router = Router.of(settings)
        policy = DeliveryPolicy.of(Ordering.KEY, KeyPolicy.HOLD)
        self.publisher = Sender(policy, self._settings.max_in_flight, unroutable=self._unroutable)
        self._read: dict[int, Stored] = {}  # rows in flight, by the row's id
        self._after = 0  # the rows that may go were read up to this position
        self._confirmed: list[Stored] = []  # confirmed, but not yet deleted
        self._faults: list[Fault] = []  # not yet noted in the file
        self._refused: dict[int, str] = {}  # by position: which message was refused, and why
        self._failure: str | None = None
        self._stopping = False

    @property
    def reasons(self) -> Sequence[str]:
        told = list(self._refused.values())[:REASONS_TOLD]
        more = len(self._refused) - len(told)
        failure = [f"{self._file.path}: {self._failure}"] if self._failure else []
        return [*failure, *told, *([f"{more} more messages are refused"] if more else [])]

    def lets_go(self, row: Row) -> bool:
        return self._unroutable(row) is Unroutable.SENT

    def _unroutable(self, row: Row) -> Unroutable:
        """Return what is done with an unroutable row. A discarded row counts as sent, as a file has no place for it."""
        kept = self._router.unroutable(row) is Unroutable.QUARANTINE
        return Unroutable.QUARANTINE if kept else Unroutable.SENT

    async def open(self) -> None:
        await self._file.open()
        self._refused = {each.position: _told(each, each.reason) for each in await self._file.held()}

    async def close(self) -> None:
        await self._file.close()

    async def write(self, entries: Sequence[Entry]) -> None:
        try:
            await self._file.write(entries)
        except (sqlite3.Error, OSError) as error:
            raise NotAcceptedError(f"{self._file.path} could not be written: {error}") from error
        self.publisher.wake()

    async def left(self) -> Left:
        try:
            return await self._file.left()
        except sqlite3.Error as error:
            raise BufferFileError(f"{self._file.path} could not be read: {error}") from error

    async def run(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                await self._settle()
                await self._offer()
            except sqlite3.Error as error:  # for example a full disk; the rows stay in the file
                self._failure = str(error)
                failures += 1
                log.warning("buffer.failed", path=str(self._file.path), reason=self._failure)
                await asyncio.sleep(backoff(failures, RETRY_INITIAL, RETRY_MAX))
            else:
                failures, self._failure = 0, None
                await wait_for_event(self.publisher.settled, LOOK_INTERVAL)
        with suppress(TimeoutError, sqlite3.Error):  # rows that are not deleted are sent again
            async with asyncio.timeout(self._settings.drain_timeout):
                while await self.publisher.wait_settled():
                    await self._settle()

    def stop(self) -> None:
        self._stopping = True
        self.publisher.stop()

    async def _settle(self) -> None:
        confirmed, faults = self.publisher.take_settled()
        self._confirmed += [self._read[row.id] for row in confirmed]
        self._faults += faults
        if self._confirmed:
            await self._file.forget(self._confirmed)
        for stored in self._confirmed:
            del self._read[stored.row.id]
            if self._refused.pop(stored.position, None) is not None:
                self._after = min(self._after, stored.position)  # the rows that waited behind it must be read
                log.info("message.released", message_id=stored.row.message_id.decode(), attempts=stored.attempts)
        self._confirmed.clear()
        while self._faults:
            await self._hold(self._faults[0])
            del self._faults[0]

    async def _hold(self, fault: Fault) -> None:
        """Keep a refused row in the file, and drop the rows that were read behind it: they are read again later."""
        stored = self._read[fault.row.id]
        wait = backoff(stored.attempts + 1, self._settings.backoff_initial, self._settings.backoff_max)
        await self._file.hold(stored, wait, fault.reason)
        for row in (fault.row, *self.publisher.queue.remove_followers(fault.row)):
            del self._read[row.id]
        if stored.position not in self._refused:
            log.error("message.held", message_id=fault.row.message_id.decode(), reason=fault.reason)
        self._refused[stored.position] = _told(stored, fault.reason)

    async def _offer(self) -> None:
        """Read more rows into the window if it has room."""
        under_way = {stored.position: stored for stored in self._read.values()}
        room = self._settings.max_window_rows - len(under_way)
        size = self._settings.max_window_bytes - sum(stored.row.size for stored in under_way.values())
        if room <= 0 or size <= 0:
            return
        tried = sum(bool(stored.attempts) for stored in under_way.values())
        due = await self._file.read_due(min(TRIED_AT_ONCE, room), size) if self._refused and not tried else []
        new = await self._file.read(self._after, min(ROWS_PER_READ, room), size)
        fresh = [stored for stored in (*due, *new) if stored.position not in under_way]
        self._read |= {stored.row.id: stored for stored in fresh}
        for stored in due:
            self.publisher.queue.send_alone(stored.row.id)
        self.publisher.offer([stored.row for stored in fresh])
        if new:
            self._after = new[-1].position
            self.publisher.wake()  # there may be more


def _told(stored: Stored, reason: str) -> str:
    row = stored.row
    key = "" if row.aggregate_id is None else f" of {row.aggregate_type.decode()} {row.aggregate_id.decode()}"
    return f"message {row.message_id.decode()}{key}: {reason}"
