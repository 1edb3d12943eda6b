"""Apply the messages of a queue once each, in order per key, acknowledged after the commit.

    @on("InvoiceIssued")
    async def project(message: Message, connection: psycopg.AsyncConnection) -> None:
        await connection.execute("INSERT INTO ...", ...)

    consumer = Consumer("billing", [project], inbox=Inbox(database, "billing"), broker=broker)
    asyncio.run(consumer.run())

A lost broker or database is waited for. A process that dies leaves unacknowledged what it had not committed, and what
it had committed is known to the inbox: both come again, and only the first has an effect.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from zlib import crc32

import structlog
from aiormq.abc import AbstractChannel, ConsumerCallback, DeliveredMessage
from aiormq.exceptions import AMQPError, ChannelInvalidStateError, ChannelNotFoundEntity

from relay.broker import connect
from relay.consume.handlers import AsyncHandler, SyncHandler, collect_handlers
from relay.consume.inbox import Inbox, open_transactions
from relay.consume.message import read_delivery
from relay.consume.receipts import Receipts
from relay.consume.worker import Backoff, Counters, Worker
from relay.errors import BrokerUnavailableError, ConfigurationError, QueueMissingError, UnhandledMessageError
from relay.settings import BrokerSettings

CLOSE_TIMEOUT = 2.0  # seconds for a goodbye to a broker that may be gone
LOST = (AMQPError, ChannelInvalidStateError, OSError)  # TimeoutError is an OSError
MAX_PREFETCH = 65535  # AMQP has 16 bits for it

log = structlog.get_logger("relay.consume")


class Consumer:
    """Consumes one queue, which must exist.

    Args:
        concurrency: transactions at the same time, each on a database connection of its own. Messages of one key
            (aggregate type and id) stay in one of them and in order.
        batch_size: messages in one transaction, at most. When one of them fails, the batch is rolled back and done
            again one by one, so what a handler does outside of the database may be done twice.
        pipeline: send the handlers' statements without waiting for each answer (psycopg's pipeline mode). An error
            then shows at a later statement or at the end, and `rowcount` is unknown before a fetch.
        drain_timeout: seconds that running transactions get when the consumer is stopped.

    While a message fails it keeps one place of the prefetch: with concurrency and batch_size 1 everything waits for it.

    A message without a UUID as message_id, or of a type that no handler takes, stops the consumer with
    UnhandledMessageError: to acknowledge it would lose it. `@on("*")` takes all other types.
    """

    def __init__(
        self,
        queue: str,
        handlers: Iterable[AsyncHandler | SyncHandler],
        *,
        inbox: Inbox,
        broker: BrokerSettings,
        concurrency: int = 4,
        batch_size: int = 1,
        pipeline: bool = False,
        drain_timeout: float = 8.0,
        backoff: Backoff = Backoff(),  # noqa: B008 (immutable)
    ) -> None:
        if concurrency < 1 or batch_size < 1 or concurrency * batch_size > MAX_PREFETCH:
            raise ConfigurationError(
                f"concurrency ({concurrency}) and batch_size ({batch_size}) are at least 1,"
                f" and their product at most {MAX_PREFETCH}"
            )
        self.queue = queue
        self.counters = Counters()
        self._handlers = collect_handlers(handlers)
        if pipeline and not self._handlers.is_async:
            raise ConfigurationError("pipeline needs `async def` handlers")
        self._inbox = inbox
        self._broker = broker
        self._concurrency = concurrency
        self._batch_size = batch_size
        self._pipeline = pipeline
        self._drain_timeout = drain_timeout
        self._backoff = backoff
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()
        self._was_ready = False
        self._failures = 0  # of the broker, since the consumer was last ready

    @property
    def prefetch(self) -> int:
        """How many unacknowledged messages the broker gives us: as many as can be worked on."""
        return self._concurrency * self._batch_size

    def stop(self) -> None:
        """Drain and let `run` return; a second call does not wait for the running transactions."""
        if self._stop.is_set():
            self._stop_at_once.set()
        self._stop.set()

    async def run(self, *, signals: bool = True) -> None:
        """Consume until `stop`, or SIGTERM or SIGINT when `signals` (main thread only).

        Raises:
            DatabaseUnavailableError, SchemaError, BrokerUnavailableError, QueueMissingError: at the start. Once it has
                been ready, it waits for these to heal.
            UnhandledMessageError: a message that nobody can apply; it is still in the queue.
        """
        with self._signals() if signals else nullcontext():
            try:
                await self._inbox.check()
                while not self._stop.is_set():
                    try:
                        async with self._channel() as channel:
                            await self._consume(channel)
                    except (BrokerUnavailableError, QueueMissingError, *LOST) as error:
                        if not self._was_ready:
                            raise
                        await self._wait_for_broker(error)
            finally:
                log.info("consumer.stopped", queue=self.queue, **asdict(self.counters))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[AbstractChannel]:
        connection = await connect(self._broker, f"outbox-consumer {self._inbox.consumer_name}")
        try:
            async with asyncio.timeout(self._broker.connect_timeout):
                channel = await connection.channel(publisher_confirms=False)
                # aiormq's own channel: aio-pika would make a second task and a large object of each delivery.
                underlay = await channel.get_underlay_channel()
            yield underlay
        finally:
            await connection.hang_up()

    async def _consume(self, channel: AbstractChannel) -> None:
        """Consume on this channel until it is lost or we are stopped; then let the running transactions finish."""
        receipts = Receipts(channel)
        workers = [
            Worker(
                open_transactions(self._inbox, self._handlers, pipeline=self._pipeline),
                receipts.settle,
                self.counters,
                self._batch_size,
                self._backoff,
            )
            for _ in range(self._concurrency)
        ]
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cancelled = asyncio.Event()  # by the broker: the queue was deleted, or its leader went down
        channel.on_consumer_cancel_callbacks.add(lambda _: cancelled.set())
        tag = await self._begin(channel, partial(self._deliver, workers, receipts, refused))
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(worker.run(), name="consume.work") for worker in workers]
            acknowledging = tasks.create_task(receipts.send(), name="consume.acknowledge")
            lost = channel.closing
            await _first(self._stop.wait(), cancelled.wait(), lost, asyncio.shield(refused))
            if not channel.is_closed:
                await self._end(channel, tag)
                log.info("consumer.draining", queue=self.queue)
            for worker in workers:
                worker.stop()
            await self._drain(working)
            acknowledging.cancel()
            await receipts.flush()
        if refused.done():
            refused.result()
        if not self._stop.is_set():
            raise BrokerUnavailableError(
                f"queue {self.queue!r} was deleted or lost its leader"
                if cancelled.is_set()
                else "the channel was closed"
            )

    async def _begin(self, channel: AbstractChannel, deliver: ConsumerCallback) -> str:
        try:
            async with asyncio.timeout(self._broker.connect_timeout):
                await channel.basic_qos(prefetch_count=self.prefetch)
                begun = await channel.basic_consume(self.queue, deliver)
        except ChannelNotFoundEntity:
            raise QueueMissingError(self.queue) from None
        self._was_ready, self._failures = True, 0
        log.info("consumer.ready", queue=self.queue, prefetch=self.prefetch, concurrency=self._concurrency)
        return str(begun.consumer_tag)

    async def _deliver(
        self, workers: Sequence[Worker], receipts: Receipts, refused: asyncio.Future[None], delivered: DeliveredMessage
    ) -> None:
        """Give a delivery to the worker of its key; without any wait, so that the order stays."""
        if refused.done():
            return
        delivery = read_delivery(delivered)
        if isinstance(delivery, str):
            refused.set_exception(UnhandledMessageError(self.queue, delivery))
        elif not self._handlers.takes(delivery.message.type):
            message_id, event_type = delivery.message.message_id, delivery.message.type
            reason = f"message {message_id} is of type {event_type!r}, which has no handler"
            refused.set_exception(UnhandledMessageError(self.queue, reason))
        else:
            receipts.expect(delivery.tag)
            workers[crc32(delivery.key.encode()) % len(workers)].put(delivery)

    async def _end(self, channel: AbstractChannel, tag: str) -> None:
        """Take no more deliveries."""
        with suppress(*LOST):  # then none will come either
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await channel.basic_cancel(tag)

    async def _drain(self, working: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the running transactions, but not too long: one that is cut is rolled back and comes again."""
        await _first(asyncio.wait(working), self._stop_at_once.wait(), within=self._drain_timeout)
        for task in working:
            task.cancel()
        await asyncio.wait(working)

    async def _wait_for_broker(self, error: Exception) -> None:
        self._failures += 1
        wait = self._backoff.seconds(self._failures)
        words = " ".join(str(error).split()) or type(error).__name__
        log.warning("broker.lost", attempts=self._failures, retry_in_s=round(wait, 3), error=words)
        await _first(self._stop.wait(), within=wait)


async def _first(*waits: Awaitable[object], within: float | None = None) -> None:
    """Wait until one of them is over, however it ends, or the time is."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
