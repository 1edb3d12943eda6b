"""Handlers under test: decoding, inbox, retries and dead letters as in production, without a broker and its waits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, LiteralString, cast
from uuid import UUID

from aiormq.abc import AbstractChannel
from psycopg.sql import Composed

from relay.consume.apply.handlers import AsyncHandler, SyncHandler
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.apply.transactions import Parameters, Rows
from relay.consume.channel import consume
from relay.consume.classify import Failure, History, Judge
from relay.consume.consumer import Consumer
from relay.consume.failed.copy_publisher import CopyPublisher
from relay.consume.failed.envelope import DEAD_ATTEMPTS, DEAD_REASON, EXCEPTION, EXCEPTION_WORDS
from relay.consume.failed.poison import BegunAttempts
from relay.consume.policies import FailurePolicy, WorkPolicy
from relay.consume.setup import Setup
from relay.consume.startup import check_inbox
from relay.errors import BrokerUnavailableError, DatabaseUnavailableError
from relay.outbox.event import Event
from relay.outbox.row import row_of
from relay.testing.memory import MemoryChannel, MemoryQueue, QueuedMessage, message_of
from relay.testing.outbox import AsyncOutbox, Outbox
from relay.testing.written import Written, given

NO_BROKER = "amqp://no-broker.invalid"  # it is never connected to
LOOK_INTERVAL = 0.002  # seconds between two looks whether all is done
# Added to each wait of a held message: it comes due by `advance` alone, however slow the machine is.
FROZEN = timedelta(days=3650)

KNOWN = """
    SELECT message_id FROM {schema}.processed_message
    WHERE consumer_name = %(consumer)s AND message_id = ANY(%(message_ids)s::uuid[])
"""
HELD = "SELECT message_id FROM {schema}.held_message WHERE consumer_name = %(consumer)s ORDER BY position"
# A head that is due, or that is claimed: a handler works on it.
UNDER_WAY = """
    SELECT count(*) FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND due_at < 'infinity' AND (due_at <= now() OR begun > 0)
"""
NEXT_DUE = """
    SELECT extract(epoch FROM min(due_at) - now() - %(frozen)s)::float8 FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND due_at < 'infinity'
"""
BRING_FORWARD = """
    UPDATE {schema}.held_message
    SET due_at = CASE WHEN due_at - %(time)s <= now() + %(frozen)s THEN now() ELSE due_at - %(time)s END
    WHERE consumer_name = %(consumer)s AND due_at < 'infinity'
"""


@dataclass(frozen=True)
class Dead:
    """A message that the consumer gave up.

    Attributes:
        reason: as in the header `x-dead-reason`: `permanent`, `exhausted`, `unhandled`, `invalid`, ...
        error: the exception's name and first line.
    """

    event: Written
    reason: str
    attempts: int
    error: str


@dataclass
class DeliveryReport:
    """What became of the messages of one call.

    Attributes:
        applied: messages that had their effect in this call, in the order of their first delivery.
        duplicates: deliveries of messages that had it before.
        failed: what handlers raised, in order; also for messages that were applied at a later try.
        held: messages that wait in `held_message` at the end, the later ones of their keys among them.
        dead: messages that were given up in this call.
    """

    applied: list[Written] = field(default_factory=list)
    duplicates: int = 0
    failed: list[BaseException] = field(default_factory=list)
    held: list[Written] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)

    def raise_first(self) -> None:
        """Raise what a handler raised first, with its traceback; return if no handler raised anything."""
        for error in self.failed:
            raise error


class Harness:
    """A consumer whose queue is in memory. Inbox, held messages and the handlers' effects are in its database.

    What it does with a message is done by the parts of `Consumer`: each call runs one until all is settled, and ends
    it. An `Overload` ends a call early; what is left is delivered by the next one.

    Args:
        handlers, inbox, failures, work: as for `Consumer`.
        queue: its name, which handlers may see.
    Attributes:
        dead: the messages that were given up, in order.
    """

    def __init__(
        self,
        handlers: Iterable[AsyncHandler | SyncHandler],
        *,
        inbox: Inbox,
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008 (immutable)
        work: WorkPolicy = WorkPolicy(),  # noqa: B008 (immutable)
        queue: str = "harness",
    ) -> None:
        given_handlers = list(handlers)

        def consumer() -> Consumer:
            return Consumer(queue, given_handlers, inbox=inbox, broker=NO_BROKER, failures=failures, work=work)

        consumer()  # raises now if the arguments do not fit together
        self._consumer: Callable[[], Consumer] = consumer
        self._queue = MemoryQueue(queue)
        self._events: dict[UUID, Written] = {}
        self._messages: dict[UUID, QueuedMessage] = {}  # a repeat is the same message, also on the next day
        self.dead: list[Dead] = []

    async def deliver(self, *events: Event | Written, times: int = 1) -> DeliveryReport:
        """Deliver these events in order, and wait until each is applied, held or dead.

        Args:
            times: how often all of them are delivered.
        """
        self._queue.ready += [self._message(event) for _ in range(times) for event in events]
        return await self._run()

    async def crash_before_ack(self, event: Event | Written) -> DeliveryReport:
        """Deliver an event to a process that dies between commit and acknowledgement, and then to the next process."""
        self._queue.ready.append(self._message(event))
        return await self._run(crashes=True)

    async def drain(self, outbox: Outbox | AsyncOutbox) -> DeliveryReport:
        """Deliver the pending rows, and those that the handlers write meanwhile, until there are no more.

        The handlers have other connections. So what they need of your transaction must be committed.
        """
        whole = DeliveryReport()
        while new := [row for row in await _rows(outbox) if row.message_id not in self._messages]:
            part = await self.deliver(*new)
            whole.applied += part.applied
            whole.duplicates += part.duplicates
            whole.failed += part.failed
            whole.dead += part.dead
            whole.held = part.held
        return whole

    async def advance(self, seconds: float) -> DeliveryReport:
        """Let time pass: retries and held messages come due, in the order of their times."""
        async with self._call() as call:
            left = seconds
            while True:
                waits = [wait for wait in (self._queue.next_due(), await call.next_due()) if wait is not None]
                step = min(left, *(max(0.0, wait) for wait in waits)) if waits else left
                left -= step
                await call.bring_forward(step)
                self._queue.bring_forward(step)
                is_paused = await call.consume()
                if is_paused or left <= 0:
                    return call.delivered

    async def _run(self, *, crashes: bool = False) -> DeliveryReport:
        async with self._call() as call:
            if crashes:
                await call.consume(loses_acks=True)
            await call.consume()
        return call.delivered

    @asynccontextmanager
    async def _call(self) -> AsyncIterator["Call"]:
        """Yield a call; at its end it has what became of the messages."""
        setup = self._consumer().setup
        call = Call(setup, self._queue, self._consumer)
        try:
            await check_inbox(setup.inbox)
            before, dead = await call.known(self._events), len(self._queue.dead)
            yield call
            applied = await call.known(self._events) - before
            delivered = call.delivered
            delivered.applied = [event for message_id, event in self._events.items() if message_id in applied]
            delivered.held = [self._events[each] for each in await call.held() if each in self._events]
            delivered.dead = [self._dead(letter) for letter in self._queue.dead[dead:]]
            self.dead += delivered.dead
        finally:
            await setup.session.close()

    def _message(self, event: Event | Written) -> QueuedMessage:
        written = event if isinstance(event, Written) else given(row_of(event, None))
        if written.message_id not in self._messages:
            self._events[written.message_id] = written
            self._messages[written.message_id] = message_of(written, len(self._messages) + 1)
        return self._messages[written.message_id]

    def _dead(self, letter: QueuedMessage) -> Dead:
        properties = letter.header.properties
        headers: dict[str, Any] = dict(properties.headers or {})
        error = f"{headers[EXCEPTION]}: {headers[EXCEPTION_WORDS]}".removeprefix(": ")
        return Dead(
            event=self._events[UUID(properties.message_id)],
            reason=headers[DEAD_REASON],
            attempts=headers[DEAD_ATTEMPTS],
            error=error,
        )


class Call:
    """One call of the harness: it runs consumers, and sees what becomes of the messages."""

    def __init__(self, setup: Setup, queue: MemoryQueue, consumer: Callable[[], Consumer]) -> None:
        self.delivered = DeliveryReport()
        self._setup = setup
        self._queue = queue
        self._consumer = consumer

    async def known(self, messages: Iterable[UUID]) -> set[UUID]:
        """Return which of these messages were applied."""
        return {each for (each,) in await self._query(KNOWN, message_ids=list(messages))}

    async def held(self) -> list[UUID]:
        return [each for (each,) in await self._query(HELD)]

    async def next_due(self) -> float | None:
        """Return the seconds until a held message comes due; None: no message is held."""
        ((seconds,),) = await self._query(NEXT_DUE, frozen=FROZEN)
        return None if seconds is None else float(seconds)

    async def bring_forward(self, seconds: float) -> None:
        await self._query(BRING_FORWARD, frozen=FROZEN, time=timedelta(seconds=seconds))

    async def consume(self, *, loses_acks: bool = False) -> bool:
        """Run a consumer until all is settled; return whether it paused for an overload, and so left something."""
        setup = self._consumer().setup
        setup.judge = RecordingJudge(setup.failures, self.delivered.failed)
        setup.session = FrozenSession(setup.inbox, setup.outages)
        setup.begun_attempts = BegunAttempts(setup.inbox, setup.session)
        setup.outgoing = cast(CopyPublisher, self._queue)
        channel = MemoryChannel(self._queue, loses_acks=loses_acks)
        running = asyncio.create_task(consume(setup, cast(AbstractChannel, channel), lambda: None), name="harness")
        try:
            while not running.done() and not await self._is_done(setup, channel):
                await asyncio.wait([running], timeout=LOOK_INTERVAL)
            is_paused = setup.gate.reason is not None
            if is_paused:
                setup.stop_at_once.set()
            setup.stop.set()
            with suppress(BrokerUnavailableError):  # the connection that was lost with the acknowledgement
                await running
        finally:
            running.cancel()
            await asyncio.wait([running])
            await setup.session.close()
        self.delivered.duplicates += setup.counters.duplicates
        return is_paused

    async def _is_done(self, setup: Setup, channel: MemoryChannel) -> bool:
        if (lost := setup.health.hindrances.get("database")) is not None:
            raise DatabaseUnavailableError(str(lost), public=lost.public)
        if setup.gate.reason is not None:
            return True
        if not channel.is_settled:
            return False
        ((under_way,),) = await self._query(UNDER_WAY) if setup.failures.holds_keys else ((0,),)
        return not under_way

    async def _query(self, statement: LiteralString, **parameters: Any) -> Rows:
        inbox = self._setup.inbox
        return await self._setup.session.run(
            inbox.statement(statement), {"consumer": inbox.consumer_name, **parameters}
        )


class RecordingJudge(Judge):
    """A judge that keeps what handlers raised."""

    def __init__(self, policy: FailurePolicy, errors: list[BaseException]) -> None:
        super().__init__(policy)
        self._errors = errors

    def failure(self, error: BaseException, history: History) -> Failure:
        self._errors.append(error)
        return super().failure(error, history)


class FrozenSession(InboxSession):
    """A session that puts each held message off until `advance` brings it forward."""

    async def run(self, statement: Composed, *parameters: Parameters) -> Rows:
        frozen = [
            {**each, "wait": each["wait"] + FROZEN} if isinstance(each, dict) and each.get("wait") else each
            for each in parameters
        ]
        return await super().run(statement, *frozen)


async def _rows(outbox: Outbox | AsyncOutbox) -> list[Written]:
    rows = outbox.all()
    found = rows if isinstance(rows, list) else await rows
    return [row for row in found if row.state == "pending"]
