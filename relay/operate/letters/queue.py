"""Read a queue of dead letters from first to last, and leave it as it was.

AMQP cannot look at a message: it is delivered to us, and comes back to its place when our channel closes. A quorum
queue counts that, and drops a message that has come back more often than its delivery limit allows. The limit is 20
unless set on RabbitMQ 4, and a client cannot ask for it. So a copy replaces what has come back a few times.
docs/decisions/0015-renew-what-came-back.md tells what was tried.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
)
from pamqp.commands import Basic, Queue

from relay.config.settings import BrokerSettings
from relay.consume.failed.copy_publisher import CopyPublisher, CopyRefusedError
from relay.consume.failed.envelope import renewed, restored_letter
from relay.errors import AccessError, BrokerUnavailableError, BusyError, NotFoundError, OutboxError
from relay.operate.letters.letter import Held, read_letter
from relay.servers.rabbitmq.connection import Connection, answer_within, connect, is_told_to_end, open_channel, words

PAGE = 200  # letters on a channel, whose bodies are in memory
# A channel keeps acknowledgements back when 32 are on their way to a quorum queue, and forgets them when it is closed.
ACKNOWLEDGED_PAGE = 30
MOST_CHANNELS = 2000  # a broker allows 2,047 unless set
MOST_RETURNS = 3  # a delivery limit of so many, or more, loses nothing
QUIET = 0.3  # seconds without a delivery, after which we ask whether any is to come
PATIENCE = 10.0  # seconds without one, although some wait
LOOKS, LOOK_INTERVAL = 50, 0.02  # so many, so many seconds apart, for letters to be back: others may have taken some

RETURNS = ("x-delivery-count", "x-acquired-count")  # whichever the limit is for
LOST = (AMQPError, ChannelInvalidStateError, OSError)


@dataclass(slots=True)
class LetterPage:
    """The letters of one channel, in their order."""

    channel: AbstractChannel
    letters: list[Held]  # that are not acknowledged


class Copy(NamedTuple):
    """A copy of a letter, for a queue."""

    of: Held
    queue: str
    properties: Basic.Properties


class DeadQueue:
    """A queue of dead letters while we read it.

    Attributes:
        count: letters that were in it when we began; what comes later is not read.
        read: how many of them we have had.
        refusal: why letters that came back often could not be replaced by copies; they are in the queue as before.
    """

    def __init__(self, broker: BrokerSettings, connection: Connection, name: str) -> None:
        self.name = name
        self.count = 0
        self.read = 0
        self.refusal: str | None = None
        self._broker = broker
        self._connection = connection
        self._outgoing = CopyPublisher(broker, "relay dead-letters copies")
        self._page: LetterPage | None = None
        self._held: list[AbstractChannel] = []
        self._left = 0  # letters of theirs, without those of the page
        self._renewed = 0  # letters that are in the queue as copies
        self._is_renewing = False
        self._came_back = False  # what was read last has come back before

    async def waiting(self, queue: str) -> int:
        """Return how many messages a queue has that are with nobody; raises as `opened`."""
        with in_words(queue):
            channel = await self._open_channel()
            count = await self._count(channel, queue)
            await self._close(channel)
            return count

    async def consumers(self, queue: str) -> int:
        """Return how many consumers a queue has; raises as `opened`."""
        with in_words(queue):
            channel = await self._open_channel()
            declared = await self._declared(channel, queue)
            await self._close(channel)
            return declared.consumer_count or 0

    async def came(self) -> int:
        """Return how many letters have come since we began; raises as `opened`."""
        return await self.waiting(self.name) + self.read - self._renewed - self.count

    async def pages(self, size: int = PAGE) -> AsyncIterator[list[Held]]:
        """Yield the letters, so many together at most; what is not acknowledged stays in the queue.

        Who acknowledges a part of a page asks for `ACKNOWLEDGED_PAGE`.
        """
        while self.read < self.count:
            with in_words(self.name):
                page = self._page = await self._next_page(min(size, PAGE, self.count - self.read))
            if not page.letters:  # another consumer has the rest
                return
            yield list(page.letters)
            await self._leave()

    async def acknowledge(self, letters: Collection[Held]) -> None:
        """Take some or all of the page that was given last out of the queue."""
        page = self._page
        if page is None or not letters:
            return
        first = list(takewhile(lambda each: each in letters, page.letters))
        left = [each for each in page.letters if each not in letters]
        with in_words(self.name):
            if first:
                await page.channel.basic_ack(first[-1].tag, multiple=True)
            for each in page.letters[len(first) :]:
                if each in letters:
                    await page.channel.basic_ack(each.tag)
        page.letters = left

    async def publish(self, copies: Iterable[Copy]) -> dict[Held, str]:
        """Send copies. Return the letters whose copies the broker refused, or did not confirm, each with the reason."""
        refused: dict[Held, str] = {}

        async def send(copy: Copy) -> None:
            try:
                await self._outgoing.publish(copy.queue, copy.properties, copy.of.delivered.body)
            except CopyRefusedError as error:
                refused[copy.of] = str(error)

        await asyncio.gather(*(send(copy) for copy in copies))
        return refused

    async def finish(self) -> None:
        """See that what was read is in its place again, or as a copy behind the rest."""
        await self._leave()
        # A quorum queue keeps what came back in a separate row, in front of the rest, and puts what comes back again
        # behind it. So a reader that takes some of that row takes all, and one that replaces some replaces all.
        if self._is_renewing or self._came_back:
            async for _ in self.pages():
                await self._leave()
                if not (self._is_renewing or self._came_back):
                    break

    async def close(self) -> None:
        """Return what is left to the queue, in its order: the broker takes the channels of a lost connection in any
        order.
        """
        try:
            with suppress(*LOST, OutboxError):
                await self._give_back()
        finally:
            await self._outgoing.close()

    async def _give_back(self) -> None:
        for channel in self._held:
            await self._close(channel)
        # A channel is closed before its letters are back: a reader that looked at once would miss some of them.
        left = self._left + (len(self._page.letters) if self._page else 0)
        for _ in range(LOOKS if left else 0):
            if await self.waiting(self.name) >= left:
                break
            await asyncio.sleep(LOOK_INTERVAL)

    async def _next_page(self, size: int) -> LetterPage:
        if len(self._held) == MOST_CHANNELS:
            raise BusyError(
                f"{self.read} letters of {self.name!r} are held, and a broker allows no more channels for them."
                " Take fewer by --limit, or see to those in front first"
            )
        channel = await self._open_channel()
        self._held.append(channel)
        arrived: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        async with answer_within(f"queue {self.name}", self._broker.connect_timeout):
            await channel.basic_qos(prefetch_count=size)
            # One consumer, and no basic.get: a hundred letters of that came back in any order.
            consumer = await channel.basic_consume(self.name, arrived.put)
        page = LetterPage(channel, [])
        quiet = 0.0
        while len(page.letters) < size and quiet < PATIENCE:
            try:
                async with asyncio.timeout(QUIET):
                    page.letters.append(self._hold(await arrived.get()))
                    quiet = 0.0
            except TimeoutError:
                quiet += QUIET
                if not await self._count(channel, self.name) and arrived.empty():
                    break
        # From now on it gets no letters in place of those that are acknowledged, or that earlier channels give back.
        async with answer_within(f"queue {self.name}", self._broker.connect_timeout):
            await channel.basic_cancel(str(consumer.consumer_tag))
        while not arrived.empty():
            page.letters.append(self._hold(arrived.get_nowait()))
        if not page.letters and quiet >= PATIENCE:
            raise BusyError(f"queue {self.name!r} gives us no letter: another consumer has it for itself")
        return page

    def _hold(self, came: DeliveredMessage) -> Held:
        self.read += 1
        delivered = restored_letter(came, self.name)
        held = Held(read_letter(self.read, delivered, self.name), delivered)
        self._came_back = returns_of(held) > 0
        return held

    async def _leave(self) -> None:
        """Keep what is left of the page until the end, when it goes back to its place; or replace it by a copy."""
        page = self._page
        if page is None:
            return
        self._is_renewing |= self.refusal is None and any(returns_of(each) >= MOST_RETURNS for each in page.letters)
        if self._is_renewing:
            copies = (Copy(each, self.name, renewed(each.delivered)) for each in page.letters)
            refused = await self.publish(copies)
            self._renewed += len(page.letters) - len(refused)
            await self.acknowledge({*page.letters} - {*refused})
            if refused:
                self.refusal, self._is_renewing = next(iter(refused.values())), False
        self._left += len(page.letters)
        if not page.letters:
            self._held.remove(page.channel)
            with in_words(self.name):
                await self._close(page.channel)
        self._page = None

    async def _count(self, channel: AbstractChannel, queue: str) -> int:
        return (await self._declared(channel, queue)).message_count or 0

    async def _declared(self, channel: AbstractChannel, queue: str) -> Queue.DeclareOk:
        async with answer_within(f"queue {queue}", self._broker.connect_timeout):
            return await channel.queue_declare(queue, passive=True)

    async def _open_channel(self) -> AbstractChannel:
        async with answer_within("a channel", self._broker.connect_timeout):
            return await open_channel(self._connection)

    async def _close(self, channel: AbstractChannel) -> None:
        async with answer_within("close a channel", self._broker.connect_timeout):
            await channel.close()


@asynccontextmanager
async def opened(broker: BrokerSettings, name: str) -> AsyncIterator[DeadQueue]:
    """Yield a queue of dead letters to read; at the end it has what was not acknowledged, in its order.

    Raises:
        BrokerUnavailableError: no connection, or it was lost.
        NotFoundError, AccessError: there is no such queue, or it is not for us to read.
        BusyError: another consumer has it for itself.
    """
    connection = await connect(broker, "relay dead-letters")
    queue = DeadQueue(broker, connection, name)
    try:
        queue.count = await queue.waiting(name)
        yield queue
        await queue.finish()
    finally:
        try:
            await queue.close()
        finally:
            await connection.hang_up()


@contextmanager
def in_words(queue: str) -> Iterator[None]:
    """Yield what the broker says of a queue in words; raises as `opened`."""
    try:
        yield
    except ChannelNotFoundEntity:
        raise NotFoundError(
            f"queue {queue!r} does not exist: check its name, and the virtual host in broker.url"
        ) from None
    except ChannelAccessRefused as error:
        raise AccessError(
            f"{words(error)}: give the user of broker.url the permission to read it (rabbitmqctl set_permissions)"
        ) from error
    except ChannelClosed as error:
        raise BusyError(f"queue {queue!r} cannot be read: {words(error)}") from error
    # The library raises CancelledError, too, when the connection goes away under it.
    except (*LOST, asyncio.CancelledError) as error:
        if is_told_to_end():
            raise
        raise BrokerUnavailableError(f"the connection was lost: {words(error)}") from error


def returns_of(held: Held) -> int:
    """Return how often it has come back to its queue; a classic queue does not count, and has no limit.

    A count of a letter that comes for the first time is its publisher's.
    """
    if not getattr(held.delivered.delivery, "redelivered", False):
        return 0
    headers = held.delivered.header.properties.headers or {}
    return max((count for name in RETURNS if isinstance(count := headers.get(name), int)), default=0)
