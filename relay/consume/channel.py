"""Consume and acknowledge on one channel, until it is lost or the consumer stops.

Then the running transactions get `drain_timeout` to finish.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from time import monotonic

from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)
from pamqp.common import Arguments

from relay.consume.apply.inbox import EVERYTHING, Admission
from relay.consume.apply.transactions import Attempt
from relay.consume.apply.transactions_factory import open_transactions
from relay.consume.classify import Failure, FailureReason, first_line, name_of, unfit
from relay.consume.counters import Counters
from relay.consume.failed.copies import ChannelContext, Copies
from relay.consume.failed.envelope import history_of, restored
from relay.consume.failed.held_messages import HeldMessages
from relay.consume.failed.held_table import NOT_HELD, TAKEN, HeldTable
from relay.consume.message import Delivery, Unreadable, read_delivery
from relay.consume.setup import Setup
from relay.consume.startup import keep_asking, keep_up
from relay.consume.worker import ChannelRepeats, KeyQueue, Worker
from relay.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DeliveryTimeoutError,
    PublicReason,
    QueueMissingError,
)
from relay.logger import get_logger
from relay.servers.postgres.database import CANCEL_TIMEOUT
from relay.servers.rabbitmq.connection import CHANNEL_LOST, answer_within, is_delivery_timeout, words

# 0 is the default priority of every consumer. Only a stream takes no priority: it refuses the argument, and so the
# consumer.
REFUSED_BY_STREAMS: Arguments = {"x-priority": 0}
CLOSE_TIMEOUT = 2.0  # seconds for a goodbye to a broker that may be gone
AFTER_TIMEOUT = (
    "the broker delivers it again, and its next try counts as before. Let its handler end sooner, or raise"
    " consumer_timeout (rabbitmq.conf; from RabbitMQ 3.12 on, consumer-timeout in a policy of the queue)"
)

log = get_logger("relay.consume")


class ChannelConsumer:
    """The workers of one channel, with the deliveries that go in and the acknowledgements that go out."""

    def __init__(
        self, setup: Setup, channel: AbstractChannel, tasks: asyncio.TaskGroup, cut_off: asyncio.Event | None = None
    ) -> None:
        self._setup = setup
        self._channel = channel
        self._tasks = tasks
        self._cut_off = cut_off or asyncio.Event()
        self._stopping = asyncio.Event()
        # By the broker: the queue was deleted, or its leader went down. From RabbitMQ 4.3 on, also a time-out.
        self._cancelled = asyncio.Event()
        self._timeout: DeliveryTimeoutError | None = None
        channel.on_consumer_cancel_callbacks.add(lambda _: self._cancelled.set())
        self._receipts = Receipts(channel, setup.counters)
        self._context = ChannelContext(
            counters=setup.counters,
            backoff=setup.work.backoff,
            begun_attempts=setup.begun_attempts,
            settle=self._receipts.settle,
            stopping=self._stopping,
        )
        self._copies = Copies(
            context=self._context,
            outgoing=setup.outgoing,
            queue=setup.queue,
            dead_queue=setup.dead_queue,
            consumer_name=setup.inbox.consumer_name,
            tasks=tasks,
        )
        self._attempts: list[Attempt] = []
        self._held = self._hold() if setup.failures.holds_keys else None
        self._key_queue = KeyQueue()
        self._repeats = ChannelRepeats(setup.inbox, setup.session)
        self._workers = [self._worker() for _ in range(setup.work.workers)]

    async def begin(self) -> str:
        """Ask for deliveries, and return the consumer's tag.

        Raises:
            ConfigurationError: the queue is a stream, or the user may not read it.
            QueueMissingError, and the errors of a lost connection.
        """
        queue = self._setup.queue
        try:
            async with answer_within(f"consume {queue}", self._setup.broker.connect_timeout):
                await self._channel.basic_qos(prefetch_count=self._setup.prefetch)
                begun = await self._channel.basic_consume(queue, self._deliver, arguments=REFUSED_BY_STREAMS)
        except ChannelNotFoundEntity:
            raise QueueMissingError(queue) from None
        except ChannelPreconditionFailed as error:
            raise ConfigurationError(
                f"queue {queue!r} is a stream, which keeps acknowledged messages and does not deliver others again."
                f" Consume a quorum or classic queue, bound to the same exchange ({words(error)})"
            ) from error
        except ChannelAccessRefused as error:
            raise ConfigurationError(
                f"queue {queue!r} cannot be consumed: {words(error)}. Give the user of broker.url the permission to"
                " read it (rabbitmqctl set_permissions), or stop the consumer that has it for itself (exclusive)"
            ) from error
        return str(begun.consumer_tag)

    async def work(self, tag: str) -> None:
        """Work until the channel is lost or the consumer is told to stop; then drain."""
        start = self._tasks.create_task
        working = [start(worker.run(), name="consume.work") for worker in self._workers]
        if self._held is not None:
            working.append(start(self._held.run(), name="consume.hold"))
        beside = [
            start(self._receipts.send(), name="consume.acknowledge"),
            start(self._setup.stalls.run(), name="consume.watch"),
        ]
        if self._setup.fence is None:  # in a pool, the member does this once for all its partitions
            beside.append(start(keep_up(self._setup.inbox), name="consume.upkeep"))
        if self._held is None:  # else `HeldMessages` reads its table as often, and notices a lost database
            asking = keep_asking(self._setup.inbox, self._setup.session, self._stopping)
            beside.append(start(asking, name="consume.ask"))
        await wait_for_first(
            self._setup.stop.wait(), self._cancelled.wait(), self._channel.closing, self._cut_off.wait()
        )
        await self._note_timeout()
        drain_until = asyncio.get_running_loop().time() + self._setup.work.drain_timeout
        if self._cut_off.is_set():
            # Before the drain, which takes long without a database: while the channel is open, the queue delivers to no
            # other consumer.
            await close(self._channel)
        if not self._channel.is_closed:
            # When a single active consumer is cancelled, the broker activates the next one at once. Its unsettled
            # messages come back only at the end of its channel, and so behind newer ones. So the consumer is not
            # cancelled with order="hold".
            if not self._setup.failures.holds_keys:
                await self._cancel_consumer(tag)
            log.info("consumer.draining", queue=self._setup.queue)
        self._stopping.set()
        self._key_queue.stop()
        if self._held is not None:
            self._held.stop()
        # Each acknowledgement would let in another message, which would only wait here. So they are sent at the end.
        for task in beside:
            task.cancel()
        await self._drain([*working, *self._copies.under_way], drain_until)
        await self.let_go()
        await self._receipts.flush()
        await close(self._channel)
        self._receipts.give_back()  # also the deliveries that came until then

    def raise_if_lost(self) -> None:
        """Raise BrokerUnavailableError if the channel ended although the consumer was not told to stop."""
        if self._setup.stop.is_set():
            return
        if self._timeout is not None:
            raise self._timeout
        if self._cancelled.is_set():
            raise BrokerUnavailableError(
                f"queue {self._setup.queue!r} was deleted or lost its leader", public=PublicReason.QUEUE_GONE
            )
        raise BrokerUnavailableError("the channel was closed")

    async def _deliver(self, delivered: DeliveredMessage) -> None:
        """Put a delivery into the queue of its key. Nothing is awaited in here, so that the order stays."""
        counters = self._setup.counters
        counters.deliveries += 1
        counters.redeliveries += bool(delivered.redelivered)
        self._receipts.expect(delivered.delivery_tag or 0)
        try:
            delivered = restored(delivered, self._setup.queue)
            if self._setup.fence is not None:
                self._setup.fence.stamp(delivered)
            delivery = read_delivery(delivered, self._setup.inbox.consumer_name, by_writer=self._setup.inbox.by_writer)
        except Exception as error:  # the library would only log it, and the message would stay unacknowledged
            delivery = Unreadable(f"it cannot be read: {name_of(error)}: {first_line(error)}")
        if isinstance(delivery, Unreadable):
            self._copies.carry(delivered, unfit(FailureReason.INVALID, delivery.reason, history_of(delivered)))
        elif (failure := self._unfit_for(delivery)) is not None:
            self._copies.carry(delivered, failure)
        else:
            self._key_queue.put(delivery)

    def _unfit_for(self, delivery: Delivery) -> Failure | None:
        message = delivery.message
        if self._setup.handlers.takes(message):
            return None
        version = "" if message.version is None else f" and version {message.version!r}"
        words = f"type {message.type!r}{version} has no handler"
        return unfit(FailureReason.UNHANDLED, words, history_of(delivery.delivered))

    def _worker(self) -> Worker:
        setup = self._setup
        return Worker(
            context=self._context,
            key_queue=self._key_queue,
            attempt=self._attempt(EVERYTHING if self._held is None else NOT_HELD),
            gate=setup.gate,
            judge=setup.judge,
            aside=self._held or self._copies,
            batch_size=setup.work.batch_size,
            poison_limit=setup.failures.poison_limit,
            repeats=self._repeats,
        )

    def _hold(self) -> HeldMessages:
        setup = self._setup
        return HeldMessages(
            context=self._context,
            table=HeldTable(setup.inbox, setup.session, setup.fence),
            attempt=self._attempt(TAKEN),
            gate=setup.gate,
            judge=setup.judge,
            copies=self._copies,
            unfit_for=self._unfit_for,
            poison_limit=setup.failures.poison_limit,
        )

    def _attempt(self, admission: Admission) -> Attempt:
        setup = self._setup
        transactions = open_transactions(
            setup.inbox,
            setup.handlers,
            pipeline=setup.work.pipeline and admission is not TAKEN,
            admission=replace(admission, fence=setup.fence),
        )
        attempt = Attempt(
            transactions=transactions,
            judge=setup.judge,
            counters=setup.counters,
            outages=setup.outages,
            stopping=self._stopping,
            state=setup.state,
        )
        self._attempts.append(attempt)
        return attempt

    async def _note_timeout(self) -> None:
        """See whether the broker took back a delivery that was unacknowledged for too long; then log it.

        This is before the drain, which lasts as long as a plain function that hangs.
        """
        queue, seconds = self._setup.queue, self._receipts.oldest_seconds
        if self._setup.stop.is_set() or seconds is None:
            return
        if self._channel.is_closed:
            is_timeout = is_delivery_timeout(self._channel)
        else:
            is_timeout = self._cancelled.is_set() and await self._has_queue()
        if is_timeout:
            self._timeout = DeliveryTimeoutError(queue, seconds)
            log.warning("consumer.timed_out", queue=queue, seconds=round(seconds, 1), remedy=AFTER_TIMEOUT)

    async def _has_queue(self) -> bool:
        """Whether the queue exists: the broker does not say why it cancels a consumer.

        It is asked on a separate channel, as a refusal would close this one.
        """
        try:
            async with answer_within("look for the queue", CLOSE_TIMEOUT):
                asking = await self._channel.connection.channel(publisher_confirms=False)
                await asking.queue_declare(self._setup.queue, passive=True)
        except CHANNEL_LOST:  # also when there is no such queue
            return False
        await close(asking)
        return True

    async def _cancel_consumer(self, tag: str) -> None:
        """Take no more deliveries."""
        with suppress(*CHANNEL_LOST):  # on a lost channel, no delivery comes either
            async with answer_within("cancel a consumer", CLOSE_TIMEOUT):
                await self._channel.basic_cancel(tag)

    async def _drain(self, working: Sequence[asyncio.Task[None]], until: float) -> None:
        """Wait for running work, at most until `until`. Work that is cut off is rolled back, and comes again."""
        within = max(0.0, until - asyncio.get_running_loop().time())
        await wait_for_first(asyncio.wait(working), self._setup.stop_at_once.wait(), within=within)
        for task in working:
            task.cancel()
        _, silent = await asyncio.wait(working, timeout=2 * CANCEL_TIMEOUT)
        if silent:  # the server does not answer the cancellation, and the driver would wait for that answer
            self._setup.session.unplug()
            for attempt in self._attempts:
                attempt.transactions.unplug()
            await asyncio.wait(silent)

    async def let_go(self) -> None:
        """Forget the attempts that this consumer has ended itself: no process has died of them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._setup.begun_attempts.end_all()
                if self._held is not None:
                    await self._held.let_go()


class Receipts:
    """The deliveries of one channel that are not acknowledged yet.

    An ack that is lost with the connection is no error: the message comes again and the inbox knows it.
    """

    def __init__(self, channel: AbstractChannel, counters: Counters) -> None:
        self._channel = channel
        self._counters = counters
        self._open: dict[int, float] = {}  # when each came in, in the order of the tags
        self._settled: list[int] = []
        self._some = asyncio.Event()

    @property
    def oldest_seconds(self) -> float | None:
        """Return for how long a delivery has been open, at most; None if each is settled."""
        oldest = next(iter(self._open.values()), None)
        return None if oldest is None else monotonic() - oldest

    def expect(self, tag: int) -> None:
        self._open[tag] = monotonic()
        self._counters.unacknowledged = len(self._open)

    def settle(self, tags: Iterable[int]) -> None:
        """Mark these deliveries to be acknowledged; `send` or `flush` does it."""
        self._settled.extend(tags)
        self._some.set()

    async def send(self) -> None:
        """Acknowledge what is settled, until cancelled or the channel is lost."""
        while not self._channel.is_closed:
            await self._some.wait()
            await self.flush()

    async def flush(self) -> None:
        """Acknowledge what is settled by now."""
        with suppress(ChannelInvalidStateError, AMQPError):  # a lost ack is no error, see the class
            await self._flush()

    def give_back(self) -> None:
        """Count what is still open as given back: the channel ends, and the broker takes it back."""
        self._counters.given_back += len(self._open)
        self._counters.unacknowledged = 0

    async def _flush(self) -> None:
        self._some.clear()
        tags, self._settled = sorted(self._settled), []
        for tag in tags:
            del self._open[tag]
        self._counters.acknowledged += len(tags)
        self._counters.unacknowledged = len(self._open)
        # One ack for all deliveries before the first that is open: a quorum queue writes a log entry for each ack.
        first_open = next(iter(self._open), inf)
        below = [tag for tag in tags if tag < first_open]
        if below:
            await self._channel.basic_ack(below[-1], multiple=True, wait=False)
        for tag in tags[len(below) :]:
            await self._channel.basic_ack(tag, wait=False)


async def consume(
    setup: Setup, channel: AbstractChannel, note_ready: Callable[[], None], *, cut_off: asyncio.Event | None = None
) -> None:
    """Consume on this channel until it is lost or the consumer is told to stop.

    Args:
        cut_off: set when another consumer may have got this partition: then the channel is closed.
    Raises:
        BrokerUnavailableError: the channel was lost, or closed.
        QueueMissingError: there is no such queue.
        ConfigurationError: the queue is a stream, or the user may not read it.
    """
    refused: Exception | None = None
    tasks = asyncio.TaskGroup()
    consuming = ChannelConsumer(setup, channel, tasks, cut_off)
    try:
        async with tasks:
            try:
                tag = await consuming.begin()
            except (QueueMissingError, ConfigurationError, *CHANNEL_LOST) as error:
                refused = error
            else:
                note_ready()
                await consuming.work(tag)
    except asyncio.CancelledError:
        if not setup.stop.is_set():  # the end of a stop has no time left
            await consuming.let_go()
        raise
    if refused is not None:
        raise refused
    consuming.raise_if_lost()


async def close(channel: AbstractChannel) -> None:
    """Close a channel, and wait until the broker has taken back its unsettled messages.

    Only then may another consumer begin.
    """
    with suppress(*CHANNEL_LOST):
        async with answer_within("close a channel", CLOSE_TIMEOUT):
            await channel.close()


async def wait_for_first(*waits: Awaitable[object], within: float | None = None) -> None:
    """Wait until one of them has ended, in whatever way, or the time is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
