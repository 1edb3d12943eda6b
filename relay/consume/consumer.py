"""Apply the messages of a queue once each, in order per key, acknowledged after the commit.

    @on("InvoiceIssued")
    async def project(message: Message, connection: psycopg.AsyncConnection) -> None:
        await connection.execute("INSERT INTO ...", ...)

    consumer = Consumer("billing", [project], inbox=Inbox("postgresql://...", "billing"), broker="amqp://...")
    asyncio.run(consumer.run())

When the broker or the database is lost, the consumer waits for it. A handler that failed is called again later. A
message that cannot be applied goes to the dead letters. When a process dies, the broker delivers its unacknowledged
messages again. The inbox knows those that were committed, so only the others have an effect.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from aiormq.abc import AbstractChannel

from relay.config.secret import read_again
from relay.config.settings import BrokerSettings, Url, settings_of
from relay.consume.apply.handlers import AsyncHandler, SyncHandler, collect_handlers
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.transactions_factory import open_transactions
from relay.consume.channel import consume
from relay.consume.counters import ConsumerSnapshot, Counters
from relay.consume.failed.queues import dead_queue, dead_queue_name, prepare, retry_queues
from relay.consume.lifecycle import RunsInBlock
from relay.consume.policies import FailurePolicy, WorkPolicy
from relay.consume.queue_depth import ready_count
from relay.consume.setup import Setup
from relay.consume.startup import (
    StartWait,
    ask_inbox,
    check_inbox,
    note_queue,
    warn_of_left_behind,
    warn_of_single_batches,
)
from relay.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DeliveryTimeoutError,
    QueueMissingError,
)
from relay.logger import get_logger
from relay.runtime.backoff import Stopping, unless_stopping, wait_for_event
from relay.runtime.forks import Opened
from relay.runtime.hindrance import Hindrance
from relay.runtime.stopping import cut_after, shared_signals
from relay.servers.rabbitmq.connection import (
    CHANNEL_LOST,
    Connection,
    connect,
    hindrance_of,
    kind_of_end,
    open_channel_within,
)

BESIDE_THE_WORKERS = 3  # more database connections: for the consumer's statements, for held messages and for days

log = get_logger("relay.consume")


class Consumer(RunsInBlock):
    """Consumes one queue, which must exist: by `await consumer.run()`, or in a block by `async with consumer:`.

    Args:
        broker: its URL, or BrokerSettings.
        failures: what happens to a message that failed.
        work: how much is worked on at once, and how long it may take.
        declare: at the start, declare `<queue>.dead` and, for order="skip", the retry queues if they are missing. If
            false, they must exist.
        start_timeout: seconds for which servers that cannot be reached are waited for at the start.

    docs/consumer.md says what happens to which message.
    """

    def __init__(
        self,
        queue: str,
        handlers: Iterable[AsyncHandler | SyncHandler],
        *,
        inbox: Inbox,
        broker: BrokerSettings | Url,
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008 (immutable)
        work: WorkPolicy = WorkPolicy(),  # noqa: B008 (immutable)
        declare: bool = True,
        start_timeout: float = 0.0,
    ) -> None:
        inbox.require_connections(work.workers + BESIDE_THE_WORKERS)
        found = collect_handlers(handlers)
        open_transactions(inbox, found, pipeline=work.pipeline)  # raises now if the arguments do not fit together
        self.queue = queue
        self.setup = Setup(
            queue=queue,
            dead_queue=dead_queue_name(queue),
            handlers=found,
            inbox=inbox,
            broker=settings_of(BrokerSettings, broker),
            failures=failures,
            work=work,
        )
        steps = [] if failures.holds_keys else self.setup.judge.steps
        self._beside = [*retry_queues(queue, steps), dead_queue(queue)]
        self._may_declare = declare
        self._start = StartWait(queue, start_timeout, work.backoff)
        self._was_ready = False
        self._connection: Connection | None = None  # the current one, or the last
        self._failures = 0  # of the broker, since the consumer was last ready
        self._opened = Opened(f"the consumer of {queue!r}")  # `run` notes its process

    @property
    def prefetch(self) -> int:
        """Return how many unacknowledged messages the broker may deliver: as many as can be worked on."""
        return self.setup.prefetch

    @property
    def counters(self) -> Counters:
        return self.setup.counters

    @property
    def is_stopping(self) -> bool:
        return self.setup.stop.is_set()

    def hindrances(self) -> dict[str, Hindrance]:
        """Return why the consumer cannot work now, by part ("broker", "database", ...); empty when it can."""
        setup, connection = self.setup, self._connection
        ill = setup.health.hindrances
        found = {
            "broker": ill.get("broker")
            or (connection and (connection.loss or connection.hindrance))
            or (None if self._was_ready else Hindrance.plain("not connected yet")),
            "database": ill.get("database"),
            "overload": setup.gate.reason,
            "delivery": setup.stalls.reason,
            "consumer": Hindrance.plain("draining: it was told to stop") if setup.stop.is_set() else None,
        }
        if (refusal := self._opened.refusal) is not None:
            found["consumer"] = Hindrance.of(refusal)
        if (seconds := setup.session.silent_for) > setup.work.stall_after:
            found["database"] = Hindrance.plain(f"it has not answered for {seconds:.0f} s")
        return {part: reason for part, reason in found.items() if reason}

    def snapshot(self) -> ConsumerSnapshot:
        """Return what the consumer has done since it was made, and what it has in flight now."""
        setup = self.setup
        setup.gate.count()
        return ConsumerSnapshot(
            consumer=setup.inbox.consumer_name,
            queue=self.queue,
            ready=not self.hindrances(),
            stalled=setup.stalls.reason is not None,
            paused=setup.gate.reason is not None,
            counters=setup.counters.copy(),
            steps=setup.judge.steps,
            refused_seconds=setup.health.refusals.seconds,
        )

    async def ready_count(self) -> int | None:
        """Return the broker's count of messages that wait in the queue, without those in flight; None if unknown.

        Raises:
            ForkedError: as `run` does.
        """
        self._opened.refuse_fork()
        if self._connection is None or self._connection.is_lost:
            return None
        return await ready_count(self._connection, self.queue, self.setup.broker.connect_timeout)

    def stop(self) -> None:
        """Drain and let `run` return; a second call does not wait for the running transactions.

        Raises:
            ForkedError: as `run` does.
        """
        self._opened.refuse_fork()
        if self.setup.stop.is_set():
            self.setup.stop_at_once.set()
        self.setup.stop.set()

    def reload(self) -> None:
        """Read again the URLs that come from files, as at SIGHUP; the next connections use them.

        The log names a file that cannot be read or used (`secret.not_renewed`). Open connections stay.

        Raises:
            ForkedError: as `run` does.
        """
        self._opened.refuse_fork()
        read_again(self.setup.broker.url, *self.setup.inbox.urls)

    async def run(self, *, signals: bool | None = None) -> None:
        """Consume until `stop`, or SIGTERM or SIGINT; SIGHUP is `reload`.

        Args:
            signals: whether to handle them (main thread only); their former handlers are called, too. None: all of
                them in the task of `asyncio.run`, else those that no other code handles, such as a web server.

        Raises:
            DatabaseUnavailableError, SchemaError, BrokerUnavailableError, QueueMissingError, QueueUnfitError,
                ConfigurationError: at the start. Once the consumer has been ready, it waits until the fault is over.
            ForkedError: the consumer has run in another process, and this process is a fork of that one.
        """
        self._opened.refuse_fork()
        self._opened.note(asyncio.get_running_loop())
        setup = self.setup
        with shared_signals(self.stop, reload=self.reload, wanted=signals):
            try:
                async with cut_after(setup.stop, setup.work.drain_timeout):
                    self._start.begin()
                    await unless_stopping(setup.stop, self._start.until_done(self._prepare))
                    while not setup.stop.is_set():
                        try:
                            async with self._channel() as channel:
                                await consume(setup, channel, self._note_ready)
                        except (BrokerUnavailableError, QueueMissingError, ConfigurationError, *CHANNEL_LOST) as error:
                            if self._was_ready or self._start.goes_on(error):
                                await self._wait_for_broker(error)
                            elif not setup.stop.is_set():
                                raise
            except Stopping:
                pass
            finally:
                async with AsyncExitStack() as closing:  # both, also when it is cancelled meanwhile
                    closing.push_async_callback(setup.session.close)
                    closing.push_async_callback(setup.outgoing.close)
                log.info("consumer.stopped", queue=self.queue, **setup.counters.for_log())

    async def _prepare(self) -> None:
        setup = self.setup
        await check_inbox(setup.inbox)
        await setup.session.check()
        await warn_of_left_behind(setup.inbox, setup.session, holds=setup.failures.holds_keys)
        warn_of_single_batches(setup.handlers, setup.work.batch_size)
        await note_queue(setup.inbox, setup.session, self.queue, setup.handlers.event_types)
        await prepare(
            setup.broker,
            setup.inbox.consumer_name,
            self._beside,
            consumed=self.queue,
            may_declare=self._may_declare,
        )

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[AbstractChannel]:
        broker = self.setup.broker
        name = f"outbox-consumer {self.setup.inbox.consumer_name}"
        connecting = connect(broker, name, after=self._connection)
        self._connection = connection = await unless_stopping(self.setup.stop, connecting)
        try:
            yield await open_channel_within(connection, broker.connect_timeout)
        except (BrokerUnavailableError, *CHANNEL_LOST):
            if (loss := connection.loss) is None:
                raise
            raise BrokerUnavailableError(loss, public=loss.public) from connection.end  # not an error that followed
        finally:
            await connection.hang_up()

    def _note_ready(self) -> None:
        self._was_ready, self._failures = True, 0
        setup = self.setup
        setup.health.heal("broker")
        log.info("consumer.ready", queue=self.queue, prefetch=setup.prefetch, concurrency=setup.work.workers)

    async def _wait_for_broker(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            self.setup.counters.broker_losses[kind_of_end(error.__cause__)] += 1
        is_refusal = isinstance(error, BrokerUnavailableError) and error.is_refusal
        self.setup.health.degrade("broker", hindrance_of(error), is_refusal=is_refusal)
        if isinstance(error, DeliveryTimeoutError):
            # While it waits for the database, what it reads would only time out again. Up to RabbitMQ 4.2 each
            # time-out counts towards the delivery limit of a quorum queue.
            await ask_inbox(self.setup.inbox, self.setup.session, self.setup.stop)
        await wait_for_event(self.setup.stop, self.setup.work.backoff.seconds(self._failures))
