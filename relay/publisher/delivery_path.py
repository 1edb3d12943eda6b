"""Which way each event goes: to the broker at once, or into the buffer.

Order per key rests on three rules:
- while an event is on the direct way, the later ones of its key wait for its outcome;
- an event that is not confirmed goes into the buffer, and from then on every event does, in the order of publishing;
- the direct way is taken again only when the buffer has no row of this publisher. Its last row was confirmed before it
  was marked as sent, and it is marked before the next event goes out.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from relay.engine.row import Key, Outcome
from relay.errors import NotAcceptedError, OutboxError
from relay.logger import get_logger
from relay.publisher.buffer import Buffer, BufferedRows
from relay.publisher.direct import Direct
from relay.publisher.entry import Unaccepted
from relay.publisher.state import Mode
from relay.runtime.backoff import wait_for_event
from relay.runtime.health import Health
from relay.runtime.stopping import GOODBYES

log = get_logger(__name__)

ENTRIES_PER_WRITE = 500
# The shortest pause between two looks at the buffer: BUFFER_LOOK seconds, or LOOK_SHARE times the duration of the
# last look if that is longer. Each look reads the table.
BUFFER_LOOK = 0.1
LOOK_SHARE = 20
HOLD, HOLD_LOOK = 0.5, 0.02  # seconds
# The longest pause after a write: SLOWEST times the duration of the write, but not over LONGEST_PAUSE seconds. The
# write may have waited for a server.
SLOWEST, LONGEST_PAUSE = 64, 1.0
EMPTY = BufferedRows(0, 0)
CLOSED, STOPPED = "the publisher is closed", "the publisher has stopped"


class DeliveryPath:
    """Takes events, sends each on one of the two ways, and reports when it is accepted.

    Attributes:
        direct: the direct way, which a link connects to the broker.
        idle: set while every event that was entered is accepted or refused.
        confirmed, buffered: how many events were accepted each way.
    """

    def __init__(self, buffer: Buffer, health: Health, confirm_timeout: float) -> None:
        self._buffer = buffer
        self._health = health
        self.direct = Direct(self._settle, health, confirm_timeout, beside=buffer.publisher)
        self.mode = Mode.BUFFERED  # events that an earlier process left in the buffer go first
        self._busy: dict[Key, deque[Unaccepted]] = {}  # a key on the direct way -> the events that wait behind it
        self._held: list[Unaccepted] = []
        self._unwritten: deque[Unaccepted] = deque()  # events that go into the buffer
        self._writing: Sequence[Unaccepted] = ()
        self._write = asyncio.Event()
        self._slowness = 0  # the pause after a write, as a multiple of the write's duration
        self._closed: str | None = None
        self.waiting = self.confirmed = self.buffered = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self, entry: Unaccepted) -> None:
        """Take an event; events of one key are delivered in the order of these calls."""
        if self._closed is not None:
            raise NotAcceptedError(self._closed)
        self.waiting += 1
        self.idle.clear()
        self._send(entry)

    async def begin(self) -> None:
        """Take the direct way if the buffer is empty."""
        if self.direct.is_open and await self._buffer.left() == EMPTY:
            self._take(Mode.DIRECT)

    async def write(self) -> None:
        """Write the events that go into the buffer, until cancelled; several at once share a commit."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._write.wait()
            self._write.clear()
            while self._unwritten:
                began = clock()
                count = min(ENTRIES_PER_WRITE, len(self._unwritten))
                self._writing = [self._unwritten.popleft() for _ in range(count)]
                try:
                    await self._buffer.write(self._writing)
                except NotAcceptedError as error:
                    # The other events have waited as long for the same buffer.
                    refused = (*self._writing, *self._unwritten)
                    self._unwritten.clear()
                    for entry in refused:
                        self._refuse(entry, str(error))
                else:
                    self.buffered += count
                    for entry in self._writing:
                        self._accept(entry)
                self._writing = ()
                if self._slowness and self._closed is None:
                    await asyncio.sleep(min(self._slowness * (clock() - began), LONGEST_PAUSE))

    async def watch(self) -> None:
        """Go back to the direct way when it is open and the buffer is empty, until cancelled.

        While new events come in, the buffer may never look empty. So when it can be empty within `HOLD` seconds, new
        events are held back for that time. When more events come in than go out, they are let in more slowly.
        """
        clock = asyncio.get_running_loop().time
        last, last_at, last_buffered = EMPTY, 0.0, 0
        pause = BUFFER_LOOK
        while True:
            await asyncio.sleep(pause)
            pause = BUFFER_LOOK
            if self.mode is not Mode.BUFFERED or not self.direct.is_open or self._closed is not None:
                self._slowness = 0
                continue
            at, buffered = clock(), self.buffered
            left = await self._left()
            pause = max(pause, LOOK_SHARE * (clock() - at))
            if left is None:
                continue
            gone = last.waiting + buffered - last_buffered - left.waiting  # rows that were sent since the last look
            if left.waiting > last.waiting and gone > 0:
                self._slowness = min(2 * self._slowness or 1, SLOWEST)
            if not left.stuck and left.waiting * (at - last_at) <= gone * HOLD:
                await self._hold_back()
            last, last_at, last_buffered = left, at, buffered

    async def close(self, within: float) -> None:
        """Take no more events. Those on the direct way may be confirmed for `within` seconds, then go to the buffer."""
        self._closed = CLOSED
        if self.mode is Mode.HOLDING:
            self._take(Mode.BUFFERED)
        await wait_for_event(self.idle, within)
        if not self.idle.is_set():
            self._take(Mode.BUFFERED)
            self.direct.give_up()
            await wait_for_event(self.idle, GOODBYES)  # `end` refuses events that the buffer has not taken by then

    def end(self) -> None:
        """Refuse the events that still wait: after this, none of them is sent or written."""
        self._closed = STOPPED
        behind = [entry for waiting in self._busy.values() for entry in waiting]
        self._busy.clear()
        unsent = (*self.direct.abandon(), *behind, *self._held, *self._writing, *self._unwritten)
        if unsent:
            log.warning("publisher.unsent", events=len(unsent))
        for entry in unsent:
            self._refuse(entry, self._closed)

    def _send(self, entry: Unaccepted) -> None:
        key = entry.row.key
        if key is not None and (behind := self._busy.get(key)) is not None:
            behind.append(entry)
        else:
            self._choose(entry, deque())

    def _choose(self, entry: Unaccepted, behind: deque[Unaccepted]) -> Mode:
        """Send an event on the current way, and return that way. In mode DIRECT, the events behind it must wait."""
        if self.mode is Mode.DIRECT and not self.direct.is_open:
            self._leave_direct("; ".join(self._health.reasons) or "not connected")
        mode = self.mode
        if mode is Mode.DIRECT:
            if (key := entry.row.key) is not None:
                self._busy[key] = behind
            self.direct.send(entry)
        elif mode is Mode.HOLDING:
            self._held.append(entry)
        else:
            self._unwritten.append(entry)
            self._write.set()
        return mode

    def _settle(self, entry: Unaccepted, outcome: Outcome, reason: str) -> None:
        """Act on the outcome of an event on the direct way, and let the next event of its key go."""
        key = entry.row.key
        behind = deque[Unaccepted]() if key is None else self._busy.pop(key)
        is_let_go = outcome is Outcome.RETURNED and self._buffer.lets_go(entry.row)
        if outcome is Outcome.CONFIRMED or is_let_go:
            self.confirmed += 1
            self._accept(entry)
        elif outcome is Outcome.UNSENDABLE:  # it could not be sent from the buffer either
            self._refuse(entry, reason)
        else:
            self._leave_direct(f"{outcome}: {reason}")
            self._choose(entry, behind)
        while behind and self._choose(behind.popleft(), behind) is not Mode.DIRECT:
            pass

    def _leave_direct(self, reason: str) -> None:
        if self.mode is not Mode.BUFFERED:
            log.warning("publisher.buffering", reason=reason)
            self._take(Mode.BUFFERED)

    def _take(self, mode: Mode) -> None:
        """Take that way from now on, first for the events that were held back."""
        if mode is Mode.DIRECT:
            log.info("publisher.direct", buffered=self.buffered)
        self.mode = mode
        held, self._held = self._held, []
        for entry in held:
            self._send(entry)

    async def _hold_back(self) -> None:
        """Hold new events back until the buffer is empty, for at most `HOLD` seconds."""
        clock = asyncio.get_running_loop().time
        until = clock() + HOLD
        self.mode = Mode.HOLDING
        is_empty = False
        while self.mode is Mode.HOLDING and not is_empty and clock() < until:
            if self._unwritten or self._writing or await self._left() != EMPTY:
                await asyncio.sleep(HOLD_LOOK)
            else:
                is_empty = True
        if self.mode is Mode.HOLDING:  # the mode changes when an event on the direct way fails meanwhile
            self._take(Mode.DIRECT if is_empty and self.direct.is_open else Mode.BUFFERED)

    async def _left(self) -> BufferedRows | None:
        """Return the counts of the buffer; None if they cannot be read."""
        try:
            return await self._buffer.left()
        except OutboxError:
            return None

    def _accept(self, entry: Unaccepted) -> None:
        entry.accept()
        self._leave()

    def _refuse(self, entry: Unaccepted, reason: str) -> None:
        entry.refuse(reason)
        self._leave()

    def _leave(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.idle.set()
