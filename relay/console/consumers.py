"""How the consumers are doing: queues, dead letters, held messages, pools. One look in the background for all browsers.

A page shows what the latest look saw, so no page waits for the broker.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
from psycopg.sql import SQL
from starlette.concurrency import run_in_threadpool

from relay.config.settings import Settings
from relay.console.applied import ConsumerProgress, Noted, ProgressLooks
from relay.console.database import Database
from relay.consume.failed.queues import dead_queue_name
from relay.consume.queue_depth import QueueDepth, depth_of
from relay.errors import BrokerUnavailableError, OutboxError
from relay.logger import get_logger
from relay.operate import pool
from relay.operate.letters.work import queues_of
from relay.operate.pool import PoolStatus
from relay.operate.queues import Depths, QueueStatus, consumed_queues
from relay.operate.runbooks import Guided
from relay.runtime.backoff import wait_for_event
from relay.runtime.scrub import scrub
from relay.servers.rabbitmq.connection import Connection, connect

INTERVAL = 1.0  # seconds between two looks
SHARE = 4  # a look may take this part of the time; it mostly waits for the broker
LATE = timedelta(minutes=1)  # a shorter wait for the next try needs no operator
# Seconds until a queue that is not there is looked at again: the broker logs an error for each such look. Most queues
# of dead letters are not there.
MISSING_FOR, NO_LETTERS_FOR = 10.0, 60.0

log = get_logger(__name__)

# By the index on (consumer_name, due_at) alone. The first message of a key has a time, those behind it have infinity.
HELD = SQL("""
    SELECT consumer_name AS consumer, count(*) AS messages, count(*) FILTER (WHERE due_at < 'infinity') AS keys,
        count(*) FILTER (WHERE due_at > now() + %(late)s AND due_at < 'infinity') AS waiting,
        count(*) FILTER (WHERE due_at < now() - %(late)s) AS overdue
    FROM {schema}.held_message
    GROUP BY consumer_name
    ORDER BY messages DESC, consumer_name
""")


@dataclass(frozen=True, slots=True)
class HeldBy:
    """What a consumer holds."""

    consumer: str
    messages: int
    keys: int
    waiting: int  # keys whose next try is far off
    overdue: int  # keys that no consumer has tried in time


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A consumer and its queue.

    Attributes:
        consumer: None where no consumer has noted the queue, which the settings name.
        is_pool: the queue has partitions, and the processes are members of a pool.
        processes: that consume the queue, as the broker counts them, or members; None: nobody knows.
        ready: messages that wait; None: nobody knows.
        applied: None where the newest pages of the inbox have nothing of the consumer.
        reasons: why an operator should look at it.
    """

    consumer: str | None
    queue: str
    is_pool: bool
    processes: int | None
    ready: int | None
    applied: ConsumerProgress | None
    reasons: Sequence[Guided]


@dataclass(frozen=True, slots=True)
class SeenConsumers:
    """What one look saw.

    Attributes:
        queues: what consumers read, as far as the settings or the consumers' notes name it.
        missing: the queues of the settings that are not there.
        consumers: each with its queue, as far as the database and the broker were reached.
        letters: how many dead letters each queue has that is there.
        reasons: why messages of pools wait, as `relay pool status` tells.
        error: why nothing is known of the database, or of the broker.
        inbox_error: why nothing is known of what consumers have applied.
    """

    at: datetime
    queues: Sequence[QueueStatus]
    missing: Sequence[str]
    consumers: Sequence[ConsumerStatus]
    letters: dict[str, int]
    held: Sequence[HeldBy]
    reasons: Sequence[Guided]
    error: str | None
    inbox_error: str | None


class Consumers:
    """Looks at the consumers again and again.

    Attributes:
        latest: None until the first look has ended.
    """

    def __init__(self, settings: Settings, database: Database, inbox: Database) -> None:
        self._settings = settings
        self._database = database
        self._inbox_database = inbox
        self._inbox = ProgressLooks()
        # A consumer of a queue has its dead letters next to it, whether or not the settings list that queue, too.
        self._dead = {queues_of(queue.name)[1] for queue in settings.topology.queues}
        self._depths = Depths()
        self._missing: dict[str, float] = {}  # queues, and when to look for them again
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = asyncio.Event()
        self.latest: SeenConsumers | None = None

    def in_queues(self) -> int | None:
        """Return how many messages waited for consumers at the latest look; None when it could not tell."""
        seen = self.latest
        return None if seen is None or seen.error else sum(each.ready for each in seen.queues)

    def wake(self) -> None:
        """Look at once; any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wanted.set)

    async def run(self) -> None:
        """Look until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                begun = time.monotonic()
                self._wanted.clear()
                self.latest = await self._look()
                took = time.monotonic() - begun
                await wait_for_event(self._wanted, max(INTERVAL, took * SHARE) - took)
        finally:
            await self._hang_up()

    async def _look(self) -> SeenConsumers:
        held: Sequence[HeldBy] = ()
        pools: Sequence[PoolStatus] = ()
        queues: Sequence[QueueStatus] = ()
        missing: Sequence[str] = ()
        letters: dict[str, int] = {}
        reasons: list[Guided] = []
        error = None
        noted, applied, inbox_error = await run_in_threadpool(self._read_inbox)
        try:
            held = await run_in_threadpool(self._read_held)
            broker = await self._connect()
            status = await pool.read_status(self._settings, broker=broker)
            pools = status.pools
            counted = {dead_queue_name(each.queue): each.dead_letters or 0 for each in pools}
            dead = await self._ask(broker, self._dead - counted.keys(), again_in=NO_LETTERS_FOR)
            listed = consumed_queues(self._settings)
            in_parts = {each.queue for each in pools}
            known = consumed_queues(self._settings, {each.queue for each in noted} - in_parts)
            consumed = await self._ask(broker, known, again_in=MISSING_FOR)
            if broker.is_lost:
                raise BrokerUnavailableError(str(broker.loss))
            letters = counted | {queue: depth.ready for queue, depth in dead.items()}
            queues = self._depths.note(consumed, time.monotonic())
            missing = [queue for queue in listed if queue not in consumed]
            reasons = [pool.NO_MASTER] if pools and not status.master else []
            reasons += [reason for each in pools for reason in pool.reasons_of(each)]
        except (OutboxError, psycopg.Error) as failure:
            error = scrub(str(failure))
        except Exception as failure:  # the next look may go well
            error = "a fault of the console: see its log"
            log.error("console.look_failed", exc_info=failure)
        return SeenConsumers(
            datetime.now(UTC),
            queues,
            missing,
            _consumers(noted, applied, pools, queues),
            dict(sorted(letters.items())),
            held,
            reasons,
            error,
            inbox_error,
        )

    def _read_inbox(self) -> tuple[list[Noted], dict[str, ConsumerProgress], str | None]:
        try:
            with self._inbox_database.session() as tables:
                return *self._inbox.look(tables), None
        except (OutboxError, psycopg.Error) as failure:
            return [], {}, scrub(str(failure))

    def _read_held(self) -> list[HeldBy]:
        with self._database.session() as tables:
            return tables.rows(HeldBy, HELD, {"late": LATE})

    async def _ask(self, broker: Connection, queues: Iterable[str], *, again_in: float) -> dict[str, QueueDepth]:
        """Return what the broker tells of the queues that are there; the others are asked for again in some seconds."""
        now = time.monotonic()
        found: dict[str, QueueDepth] = {}
        for queue in sorted(queues):
            if self._missing.get(queue, now) > now:
                continue
            depth = await depth_of(broker, queue, self._settings.broker.connect_timeout)
            if depth is not None:
                found[queue] = depth
            elif not broker.is_lost:
                self._missing[queue] = now + again_in
        return found

    async def _connect(self) -> Connection:
        """Return the connection of the last look while it is open: one each time would fill the broker's log."""
        if self._connection is None or self._connection.is_lost:
            await self._hang_up()
            self._connection = await connect(self._settings.broker, "relay console")
        return self._connection

    async def _hang_up(self) -> None:
        if self._connection is not None:
            await self._connection.hang_up()
            self._connection = None


def _consumers(
    noted: Sequence[Noted],
    applied: Mapping[str, ConsumerProgress],
    pools: Sequence[PoolStatus],
    queues: Sequence[QueueStatus],
) -> list[ConsumerStatus]:
    """Return each consumer with its queue, by name; behind them the queues that no consumer has noted."""
    of_pool, of_queue = {(each.name, each.queue): each for each in pools}, {each.name: each for each in queues}
    named = {(each.consumer, each.queue) for each in noted} | of_pool.keys()
    lines: list[ConsumerStatus] = []
    for consumer, queue in sorted(named):
        done = applied.get(consumer)
        if (members := of_pool.get((consumer, queue))) is not None:
            lines.append(_of_pool(members, done))
        else:
            lines.append(_of_queue(consumer, queue, of_queue.get(queue), done))
    unnamed = of_queue.keys() - {queue for _, queue in named}
    return lines + [_of_queue(None, queue, of_queue[queue], None) for queue in sorted(unnamed)]


def _of_pool(members: PoolStatus, applied: ConsumerProgress | None) -> ConsumerStatus:
    counts = [each.ready for each in members.partitions]
    ready = None if None in counts else sum(each or 0 for each in counts)
    alive = sum(not each.late for each in members.members)
    return ConsumerStatus(members.name, members.queue, True, alive, ready, applied, pool.reasons_of(members))


def _of_queue(
    consumer: str | None, queue: str, status: QueueStatus | None, applied: ConsumerProgress | None
) -> ConsumerStatus:
    if status is None:
        return ConsumerStatus(consumer, queue, False, None, None, applied, ())
    reasons = [] if status.reason is None else [status.reason]
    return ConsumerStatus(consumer, queue, False, status.consumers, status.ready, applied, reasons)
