"""A member of a pool: it consumes the partitions that the master gives it, and releases them when the master asks.

    member = PartitionedConsumer("billing", [total], inbox=Inbox(database, "billing"), broker=broker,
                                 pool=PoolPolicy(on_assigned=load, on_revoked=save))
    asyncio.run(member.run())

`billing.partitions` is the exchange to bind. docs/partitioned-consumers.md has a drawing of the pool's parts.
"""

import asyncio
import math
import os
import socket
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from secrets import token_hex

from relay.config.secret import read_again
from relay.config.settings import BrokerSettings, Url, settings_of
from relay.consume.apply.handlers import AsyncHandler, SyncHandler
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.consumer import Consumer
from relay.consume.counters import ConsumerSnapshot, Counters
from relay.consume.failed.queues import PARTITIONS, partition_queue_name, pool_topology, prepare
from relay.consume.lifecycle import RunsInBlock
from relay.consume.policies import FailurePolicy, WorkPolicy
from relay.consume.pool.check_in import CheckIn, HeldPartition, Joining
from relay.consume.pool.database_contact import DatabaseContact
from relay.consume.pool.holding import Holding
from relay.consume.pool.member_connection import MemberConnection
from relay.consume.pool.policy import Partition, PoolPolicy
from relay.consume.startup import (
    StartWait,
    check_inbox,
    keep_up,
    note_queue,
    warn_of_left_behind,
    warn_of_single_batches,
)
from relay.errors import ConfigurationError, DatabaseUnavailableError
from relay.logger import get_logger
from relay.runtime.backoff import Backoff, Stopping, unless_stopping, wait_for_event
from relay.runtime.forks import Opened
from relay.runtime.hindrance import Hindrance
from relay.runtime.stopping import cut_after, shared_signals

CHECK_INS = 4  # within the time-out
# The database connections of a member that holds all partitions. Each partition has two, for its messages and for the
# held ones. Three more are for check-ins, for the consumer's statements and for days.
CONNECTIONS = 2 * PARTITIONS + 3
NAMESAKE_INTERVAL = 0.2  # seconds between two looks whether the namesake is gone

log = get_logger("relay.consume")


class PartitionedConsumer(RunsInBlock):
    """One of any number of processes that share the 16 partitions of a queue: each key's messages go to one of them.

    A message that failed holds its key (order="hold"). A member that no longer holds a partition cannot commit its
    messages.

    Args:
        queue: the name from which the names of the exchange and of the queues are made (`pool_topology`).
        broker: its URL, or BrokerSettings.
        inbox: its consumer_name is the name of the pool. Its database has the pool's tables, which the members and the
            master use.
        pool: how it takes part in the pool.
        failures: as for `Consumer`; `order` is "hold".
        work: as for `Consumer`; `concurrency` is 1, for each partition.
        declare: at the start, declare the exchange and the queues if they are missing. If false, they must exist.
        start_timeout: seconds for which servers that cannot be reached are waited for at the start.
    Raises:
        ConfigurationError: another `order` or `concurrency`, or an argument that `Consumer` refuses.
    """

    def __init__(
        self,
        queue: str,
        handlers: Iterable[AsyncHandler | SyncHandler],
        *,
        inbox: Inbox,
        broker: BrokerSettings | Url,
        pool: PoolPolicy = PoolPolicy(),  # noqa: B008 (immutable)
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008 (immutable)
        work: WorkPolicy = WorkPolicy(),  # noqa: B008 (immutable)
        declare: bool = True,
        start_timeout: float = 0.0,
    ) -> None:
        if work.concurrency not in (None, 1):
            raise ConfigurationError(f"concurrency ({work.concurrency}) is 1 in a pool: a partition has one worker")
        if not failures.holds_keys:
            raise ConfigurationError(f"order is 'hold' in a pool, not {failures.order!r}: keys stay in order there")
        inbox.require_connections(CONNECTIONS)
        # The broker must notice a frozen member about as soon as the master does.
        broker = settings_of(BrokerSettings, broker)
        broker = broker.model_copy(update={"heartbeat": min(broker.heartbeat, math.ceil(pool.check_in_timeout))})
        self.queue = queue
        self.member = pool.member or f"{socket.gethostname()}-{os.getpid()}-{token_hex(2)}"
        self._opened = Opened(f"the member {self.member!r} of a pool")
        self._opened.note()  # already here, because its forks would all have the same member name
        work = replace(work, concurrency=1)
        consumer = Consumer(queue, handlers, inbox=inbox, broker=broker, failures=failures, work=work, declare=declare)
        self._setup = consumer.setup
        self._may_declare = declare
        self._start = StartWait(queue, start_timeout, work.backoff)
        self._policy = pool
        self._interval = pool.check_in_timeout / CHECK_INS
        # Short waits: a member that comes back late from an outage is taken for dead.
        self._backoff = Backoff(self._interval, 2 * self._interval)
        self._session = InboxSession(inbox, self._setup.outages)  # separate: the partitions' statements wait in theirs
        self._check_in = CheckIn(inbox, self._session, queue=queue, member=self.member, timeout=pool.check_in_timeout)
        self._contact = DatabaseContact(pool.check_in_timeout)
        connection_name = f"outbox-consumer {inbox.consumer_name} {self.member}"
        self._connection = MemberConnection(broker, connection_name, self._setup.health)
        self._holdings: dict[int, Holding] = {}
        self._ended = Counters()  # of holdings that have ended
        self._changed = asyncio.Event()
        self._consumed = asyncio.Event()  # set once any partition was consumed
        self._refusal: ConfigurationError | None = None

    @property
    def partitions(self) -> list[Partition]:
        """Return the partitions that are consumed now."""
        held = sorted(self._holdings.values(), key=lambda each: each.fence.partition)
        return [Partition(each.fence.partition, each.fence.epoch) for each in held if each.is_consuming]

    @property
    def counters(self) -> Counters:
        """Return the counts of all its partitions, including those that it held before."""
        counters = self._setup.counters.copy()
        counters.add(self._ended)
        for holding in self._holdings.values():
            counters.add(holding.setup.counters)
        return counters

    def snapshot(self) -> ConsumerSnapshot:
        """Return what the member has done since it was made, and what it has in flight now."""
        self._setup.gate.count()
        return ConsumerSnapshot(
            consumer=self._setup.inbox.consumer_name,
            queue=self.queue,
            ready=not self.hindrances(),
            stalled=any(each.setup.stalls.reason for each in self._holdings.values()),
            paused=self._setup.gate.reason is not None,
            counters=self.counters,
            steps=self._setup.judge.steps,
            refused_seconds=self._setup.health.refusals.seconds,
        )

    async def ready_count(self) -> int | None:
        """Return how many messages wait in the queues of its partitions; None if unknown.

        Raises:
            ForkedError: as `run` does.
        """
        self._opened.refuse_fork()
        counts = [await self._connection.ready_count(each.setup.queue) for each in list(self._holdings.values())]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def is_stopping(self) -> bool:
        return self._setup.stop.is_set()

    def hindrances(self) -> dict[str, Hindrance]:
        """Return why the member cannot work now, by part; empty when it can, even if it holds no partition."""
        setup = self._setup
        found = {
            "broker": self._connection.hindrance if self._holdings else None,
            "database": setup.health.hindrances.get("database"),
            "overload": setup.gate.reason,
            "pool": None if self._check_in.is_member else Hindrance.plain("no member yet"),
            "delivery": next(filter(None, (each.setup.stalls.reason for each in self._holdings.values())), None),
            "partitions": next(filter(None, (each.hindrance for each in self._holdings.values())), None),
            "consumer": Hindrance.plain("draining: it was told to stop") if setup.stop.is_set() else None,
        }
        if (refusal := self._opened.refusal) is not None:
            found["consumer"] = Hindrance.of(refusal)
        return {part: reason for part, reason in found.items() if reason}

    def stop(self) -> None:
        """Release all partitions, and let `run` return; a second call does not wait for the running transactions.

        Raises:
            ForkedError: as `run` does.
        """
        self._opened.refuse_fork()
        if self._setup.stop.is_set():
            for holding in self._holdings.values():
                holding.setup.stop_at_once.set()
        self._setup.stop.set()
        self._changed.set()

    def reload(self) -> None:
        """Read again the URLs that come from files, as at SIGHUP; the next connections use them.

        The log names a file that cannot be read or used (`secret.not_renewed`). Open connections stay.

        Raises:
            ForkedError: as `run` does.
        """
        self._opened.refuse_fork()
        read_again(self._setup.broker.url, *self._setup.inbox.urls)

    async def run(self, *, signals: bool | None = None) -> None:
        """Be a member until `stop`, or SIGTERM or SIGINT; SIGHUP is `reload`.

        Args:
            signals: whether to handle them (main thread only); their former handlers are called, too. None: all of
                them in the task of `asyncio.run`, else those that no other code handles, such as a web server.

        Raises:
            DatabaseUnavailableError, SchemaError, BrokerUnavailableError, QueueUnfitError: at the start. Later the
                member waits until the fault is over.
            ConfigurationError: the broker refuses the queue of a partition, and the member has consumed no partition
                yet.
            ForkedError: the member was made in another process, and this process is a fork of that one.
        """
        self._opened.refuse_fork()
        self._opened.note(asyncio.get_running_loop())
        setup = self._setup
        with shared_signals(self.stop, reload=self.reload, wanted=signals):
            try:
                async with cut_after(setup.stop, setup.work.drain_timeout):
                    self._start.begin()
                    await unless_stopping(setup.stop, self._start.until_done(self._prepare))
                    async with asyncio.TaskGroup() as tasks:
                        upkeep = tasks.create_task(keep_up(setup.inbox), name="consume.upkeep")
                        contact = tasks.create_task(self._contact.watch(), name="pool.contact")
                        await self._belong(tasks)
                        upkeep.cancel()
                        contact.cancel()
            except Stopping:
                pass
            finally:
                async with AsyncExitStack() as closing:  # all of them, also when it is cancelled meanwhile
                    for part in (self._session, setup.session, self._connection):
                        closing.push_async_callback(part.close)
                log.info("pool.member_stopped", member=self.member, **self.counters.for_log())
        if self._refusal is not None:
            raise self._refusal

    async def _prepare(self) -> None:
        setup = self._setup
        await check_inbox(setup.inbox)
        await setup.session.check()
        await warn_of_left_behind(setup.inbox, setup.session, holds=True, by_partition=True)
        warn_of_single_batches(setup.handlers, setup.work.batch_size)
        await note_queue(setup.inbox, setup.session, self.queue, setup.handlers.event_types)
        topology = pool_topology(self.queue)
        await prepare(setup.broker, setup.inbox.consumer_name, topology, may_declare=self._may_declare)
        await self._join()

    async def _join(self) -> None:
        """Become a member, once the name is free; or return when it is time to stop."""
        is_logged = False
        while not self._setup.stop.is_set():
            if await self._check_in.join() is Joining.JOINED:
                log.info("pool.joined", pool=self._setup.inbox.consumer_name, member=self.member)
                return
            if not is_logged:
                log.warning(
                    "pool.namesake",
                    member=self.member,
                    reason="another member has this name, or the master has not removed it yet",
                )
            is_logged = True
            await wait_for_event(self._setup.stop, NAMESAKE_INTERVAL)

    async def _belong(self, tasks: asyncio.TaskGroup) -> None:
        """Check in, and act on the answers, until it is time to stop and no partition is held."""
        stopping = self._setup.stop
        with self._setup.outages.begin(self._backoff) as outage:
            while True:
                self._changed.clear()
                try:
                    await self._look(tasks)
                    if stopping.is_set() and not self._check_in.is_member and not self._holdings:
                        return
                    outage.end()
                    await wait_for_event(self._changed, self._interval)
                except DatabaseUnavailableError as error:
                    if stopping.is_set():
                        if not self._holdings:
                            return  # the master notices that the member is gone
                        for holding in self._holdings.values():
                            holding.stop()
                    await outage.wait(error, self._changed)

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Check in once, and act on the answer; leave the pool when it is time to stop and no partition is held."""
        is_leaving = self._setup.stop.is_set()
        if not self._check_in.is_member:
            if is_leaving:
                return
            await self._join()
        in_hand = sum(each.setup.counters.unacknowledged for each in self._holdings.values())
        assigned = await self._check_in.check_in(leaving=is_leaving, unacknowledged=in_hand)
        if not self._check_in.is_member:
            log.warning("pool.removed", member=self.member, reason="the master took this member for dead")
        held = {each.fence: each for each in assigned}
        for holding in self._holdings.values():
            if holding.fence not in held:
                holding.lose()
            elif is_leaving or held[holding.fence].is_wanted:
                holding.stop()
        self._contact.keep()  # only now: a holding that was lost above must not begin again
        for each in assigned:
            if each.fence.partition in self._holdings:
                continue  # it is held, or an earlier epoch of it is still being released
            if is_leaving or each.is_wanted:
                await self._check_in.release(each.fence)
            else:
                self._hold(each, tasks)
        if is_leaving and not assigned and not self._holdings:
            await self._check_in.leave()

    def _hold(self, held: HeldPartition, tasks: asyncio.TaskGroup) -> None:
        queue = partition_queue_name(self.queue, held.fence.partition)
        holding = Holding(
            self._setup.of(held.fence, queue),
            held.fence,
            policy=self._policy,
            connection=self._connection,
            contact=self._contact,
            taken_from=held.taken_from,
            consumed=self._consumed,
        )
        self._holdings[held.fence.partition] = holding
        log.info("pool.partition_assigned", member=self.member, partition=held.fence.partition, epoch=held.fence.epoch)
        tasks.create_task(self._run(holding), name=f"pool.partition {held.fence.partition}")

    async def _run(self, holding: Holding) -> None:
        try:
            await self._run_and_release(holding)
        finally:
            self._ended.add(holding.setup.counters.ended())
            del self._holdings[holding.fence.partition]
            self._changed.set()

    async def _run_and_release(self, holding: Holding) -> None:
        try:
            await holding.run()
        finally:
            # Each partition has a separate connection for copies: a copy that is cut off ends its connection. With a
            # shared one, the copies of other partitions would be sent twice.
            await holding.setup.outgoing.close()
        if holding.refusal is not None:
            self._refusal = holding.refusal
            self._setup.stop.set()
        values = {"member": self.member, "partition": holding.fence.partition, "epoch": holding.fence.epoch}
        if not holding.is_lost:
            await self._release(holding)
        if holding.is_lost:
            log.warning("pool.partition_lost", **values)
        else:
            log.info("pool.partition_released", **values)

    async def _release(self, holding: Holding) -> None:
        with self._setup.outages.begin(self._backoff) as outage:
            while not holding.is_lost:  # it may be lost during a wait
                try:
                    await self._check_in.release(holding.fence)
                    outage.end()
                    return
                except DatabaseUnavailableError as error:
                    await outage.wait(error, self._setup.stop)
                    if self._setup.stop.is_set():
                        return  # the master notices that the member is gone
