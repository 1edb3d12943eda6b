"""Handlers under test: decoding, inbox, retries and dead letters as in production, without a broker and its waits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, NamedTuple, cast
from uuid import UUID

from aiormq.abc import AbstractChannel
from psycopg.sql import Composed

from relay.consume.apply.fence import NO_PARTITION
from relay.consume.apply.handlers import AsyncHandler, Handlers, SyncHandler
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.apply.transactions import Parameters, Rows
from relay.consume.channel import consume
from relay.consume.classify import Failure, History, Judge
from relay.consume.consumer import Consumer
from relay.consume.failed.copy_publisher import CopyPublisher
from relay.consume.failed.envelope import DEAD_ATTEMPTS, DEAD_REASON, EXCEPTION, EXCEPTION_WORDS, unpack
from relay.consume.failed.poison import BegunAttempts
from relay.consume.hindrances import Outages
from relay.consume.message import Message
from relay.consume.policies import FailurePolicy, WorkPolicy
from relay.consume.setup import Setup
from relay.consume.startup import check_inbox
from relay.errors import BrokerUnavailableError, DatabaseUnavailableError, MessageError
from relay.outbox.declared import Declared
from relay.outbox.events import Event
from relay.outbox.row import row_of
from relay.testing.memory import MemoryChannel, MemoryQueue, QueuedMessage, message_of, relays_encoder, written_of
from relay.testing.outbox import AsyncOutbox, Outbox
from relay.testing.written import Written, given

NO_BROKER = "amqp://no-broker.invalid"  # it is never connected to
LOOK_INTERVAL = 0.002  # seconds between two looks whether all is done
MOST_NAMED = 5  # messages that a call waits for
MOST_SECONDS = 10 * 365 * 86_400.0  # of one `advance`
# A held message waits in virtual time: `due_at` is this moment and its wait. So it comes due by `advance` alone.
FROZEN = datetime(3000, 1, 1, tzinfo=UTC)
FAR = timedelta(days=400_000)  # behind that moment

KNOWN = """
    SELECT message_id FROM {schema}.processed_message
    WHERE consumer_name = %(consumer)s AND message_id = ANY(%(message_ids)s::uuid[])
"""
HELD = """
    SELECT message_id, envelope, body, exchange, routing_key FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND partition = %(no_partition)s
    ORDER BY position
"""
# Heads that are due, or that are claimed: a handler works on them. A head without a time gets one at once: the message
# before it has just left.
UNDER_WAY = """
    SELECT event_type, message_id::text FROM {schema}.held_message AS held
    WHERE consumer_name = %(consumer)s AND partition = %(no_partition)s AND (due_at < %(frozen)s OR (
        due_at = 'infinity' AND NOT EXISTS (
            SELECT FROM {schema}.held_message AS earlier
            WHERE earlier.consumer_name = held.consumer_name AND earlier.key = held.key
                AND earlier.position < held.position
        )
    ))
    ORDER BY position
"""
# What a consumer has left behind that is no more.
UNCLAIM = """
    UPDATE {schema}.held_message SET due_at = now()
    WHERE consumer_name = %(consumer)s AND partition = %(no_partition)s AND due_at < %(frozen)s
"""
FREEZE = """
    UPDATE {schema}.held_message SET due_at = %(frozen)s + %(wait)s
    WHERE consumer_name = %(consumer)s AND (message_id = %(message_id)s OR position = %(position)s)
"""
NEXT_DUE = """
    SELECT min(greatest(due_at - %(frozen)s, interval '0')) FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND partition = %(no_partition)s AND due_at < 'infinity'
"""
BRING_FORWARD = """
    UPDATE {schema}.held_message
    SET due_at = CASE WHEN due_at - %(time)s <= %(frozen)s THEN now() ELSE due_at - %(time)s END
    WHERE consumer_name = %(consumer)s AND partition = %(no_partition)s AND due_at >= %(frozen)s AND due_at < 'infinity'
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


class HandlerCall(NamedTuple):
    """A call of a handler for a message; one that takes a list is called once for all messages of the list."""

    handler: AsyncHandler | SyncHandler
    message_id: UUID


@dataclass
class DeliveryReport:
    """What became of the messages of one call, also of those that another harness of this consumer has left.

    Attributes:
        applied: messages that had their effect in this call, in the order of their first delivery.
        duplicates: deliveries of messages that had it before.
        failed: what handlers raised, in order; also for messages that were applied at a later try.
        held: messages that wait in `held_message` at the end, the later ones of their keys among them.
        waiting: messages that wait in a retry queue at the end, or in the queue after an `Overload`.
        dead: messages that were given up in this call, or in an earlier one that ended by an error.
        overload: the words of an `Overload` that has ended the call.
        calls: which handler was called for which message, in order; also when it failed.
    """

    applied: list[Written] = field(default_factory=list)
    duplicates: int = 0
    failed: list[BaseException] = field(default_factory=list)
    held: list[Written] = field(default_factory=list)
    waiting: list[Written] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)
    overload: str | None = None
    calls: list[HandlerCall] = field(default_factory=list)

    def applied_by(self, handler: AsyncHandler | SyncHandler) -> list[Written]:
        """Return the messages of `applied` that this one of the harness's handlers has applied."""
        last = {message_id: called for called, message_id in self.calls}
        return [event for event in self.applied if last.get(event.message_id) == handler]

    def raise_first(self) -> None:
        """Raise what a handler raised first, with its traceback; else a MessageError for the first dead letter.

        It returns if no handler raised anything, and each message had a handler.
        """
        for error in self.failed:
            raise error
        for dead in self.dead:
            raise MessageError(f"{dead.event.event_type} {dead.event.message_id} is {dead.reason}: {dead.error}")


class Harness:
    """A consumer whose queue is in memory. Inbox, held messages and the handlers' effects are in its database.

    What it does with a message is done by the parts of `Consumer`: each call runs one until all is settled, and ends
    it. An `Overload` ends a call early; what is left is delivered by the next one. One call runs at a time.

    Args:
        handlers, inbox, failures, work: as for `Consumer`.
        queue: its name, which handlers may see.
        timeout: seconds that a call may take.
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
        timeout: float = 30.0,
    ) -> None:
        if not isinstance(inbox, Inbox):
            raise TypeError(f"inbox is a {type(inbox).__name__}: give an Inbox, as in Inbox(url, 'accounting')")
        given_handlers = list(handlers)

        def consumer() -> Consumer:
            return Consumer(queue, given_handlers, inbox=inbox, broker=NO_BROKER, failures=failures, work=work)

        consumer()  # raises now if the arguments do not fit together
        self._consumer: Callable[[], Consumer] = consumer
        self._queue = MemoryQueue(queue)
        self._encoder = relays_encoder()
        self._timeout = timeout
        self._passed = timedelta()  # by `advance`
        self._is_busy = False
        self._events: dict[UUID, Written] = {}
        self._messages: dict[UUID, QueuedMessage] = {}  # a repeat is the same message, also on the next day
        self.dead: list[Dead] = []

    async def deliver(self, *events: Event | Declared | Written, times: int = 1) -> DeliveryReport:
        """Deliver these events, and wait until each is applied, held, waiting or dead.

        Those of one key are applied in order, and those of two keys in any order. `available_at` is not asked.

        Args:
            times: how often all of them are delivered.
        Raises:
            TimeoutError: `timeout` is over; what was not settled is delivered by the next call.
        """
        if times < 1:
            raise ValueError(f"times is {times}; it is at least 1")
        messages = self._messages_of(events)
        async with self._call() as call:
            self._queue.ready += messages * times
            await call.consume()
        return call.report

    async def crash_before_ack(self, event: Event | Declared | Written) -> DeliveryReport:
        """Deliver an event to a process that dies between commit and acknowledgement, and then to the next process."""
        messages = self._messages_of([event])
        async with self._call() as call:
            self._queue.ready += messages
            await call.consume(loses_acks=True)
            await call.consume()
        return call.report

    async def drain(self, outbox: Outbox | AsyncOutbox) -> DeliveryReport:
        """Deliver the pending rows that are due, and those that the handlers write meanwhile, until there are no more.

        The handlers have other connections. So what they need of your transaction must be committed.

        Raises:
            AssertionError: the transaction of the outbox has rows that it has not committed; nothing is delivered.
        """
        await _require_commit(outbox)
        async with self._call() as call:
            while True:
                rows = [row for row in await _rows(outbox) if row.message_id not in self._messages]
                now = datetime.now(UTC) + self._passed
                new = self._messages_of([row for row in rows if row.available_at is None or row.available_at <= now])
                self._queue.ready += new
                if await call.consume() or not new:
                    break
        return call.report

    async def advance(self, seconds: float) -> DeliveryReport:
        """Let time pass: retries and held messages come due, in the order of their times.

        A wait is shorter than its step by chance (`Retries.jitter`): advance by the whole step, or set `jitter=0`.
        """
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError(f"seconds are {seconds}; they are at least 0, and at most {MOST_SECONDS:.0f}")
        async with self._call() as call:
            left = timedelta(seconds=seconds)
            while True:
                waits = [wait for wait in (self._queue.next_due(), await call.next_due()) if wait is not None]
                step = min([left, *waits])
                left -= step
                self._passed += step
                await call.bring_forward(step)
                self._queue.bring_forward(step)
                if await call.consume() or not left:
                    break
        return call.report

    @asynccontextmanager
    async def _call(self) -> AsyncIterator["Call"]:
        """Yield a call; at its end its report is complete, however it ends."""
        if self._is_busy:
            raise RuntimeError("another call of this harness is running: await it first")
        self._is_busy = True
        setup = self._consumer().setup
        call = Call(setup, self._queue, self._consumer)
        try:
            async with asyncio.timeout(self._timeout):
                await check_inbox(setup.inbox)
                self._events = {event.message_id: event for event in await call.begin()} | self._events
                before = await call.known(self._events)
                yield call
                applied = await call.known(self._events) - before
                report = call.report
                report.applied = [event for message_id, event in self._events.items() if message_id in applied]
                report.held = [self._event(event) for event in await call.held()]
                waiting = [*self._queue.ready, *(message for _, message in self._queue.waiting)]
                report.waiting = [self._event(written_of(message)) for message in waiting]
                report.dead = [self._dead(letter) for letter in self._queue.dead[len(self.dead) :]]
                self.dead += report.dead
        except TimeoutError as error:
            raise TimeoutError(f"not settled within {self._timeout:g} s: {call.under_way}") from error
        finally:
            self._is_busy = False
            await setup.session.close()

    def _messages_of(self, events: Iterable[Event | Declared | Written]) -> list[QueuedMessage]:
        """Return the messages of these events. If one cannot be a message, none of them is noted."""
        rows = [event if isinstance(event, Written) else given(row_of(event, None)) for event in events]
        new = {row.message_id: row for row in rows if row.message_id not in self._messages}
        first = len(self._messages) + 1
        made = {each: message_of(row, place, self._encoder) for place, (each, row) in enumerate(new.items(), first)}
        self._events |= new
        self._messages |= made
        return [self._messages[row.message_id] for row in rows]

    def _event(self, found: Written) -> Written:
        """Return the event as the test gave it, if it did."""
        return self._events.get(found.message_id, found)

    def _dead(self, letter: QueuedMessage) -> Dead:
        headers: dict[str, Any] = dict(letter.header.properties.headers or {})
        error = f"{headers[EXCEPTION]}: {headers[EXCEPTION_WORDS]}".removeprefix(": ")
        event = self._event(written_of(letter))
        return Dead(event=event, reason=headers[DEAD_REASON], attempts=headers[DEAD_ATTEMPTS], error=error)


class Call:
    """One call of the harness: it runs consumers, and sees what becomes of the messages."""

    def __init__(self, setup: Setup, queue: MemoryQueue, consumer: Callable[[], Consumer]) -> None:
        self.report = DeliveryReport()
        self._applied = 0
        self._waits_for: tuple[str, Sequence[tuple[str, str]]] | None = None  # words, and the type and id of each
        self._setup = setup
        self._queue = queue
        self._consumer = consumer

    @property
    def under_way(self) -> str:
        """Return what the call waits for, in words."""
        if self._waits_for is None:
            return "the database"
        what, messages = self._waits_for
        named = [f"{event_type} {message_id}" for event_type, message_id in messages[:MOST_NAMED]]
        named += [f"{len(messages) - MOST_NAMED} more"] if len(messages) > MOST_NAMED else []
        problem = f"{len(messages)} {what}, and {self._applied} were applied"
        return f"{problem}: {', '.join(named)}" if named else problem

    async def begin(self) -> list[Written]:
        """Make due what a consumer that is no more has left behind, and return what is held."""
        await self._query(UNCLAIM)
        return await self.held()

    async def known(self, messages: Iterable[UUID]) -> set[UUID]:
        """Return which of these messages were applied."""
        return {each for (each,) in await self._query(KNOWN, message_ids=list(messages))}

    async def held(self) -> list[Written]:
        return [
            replace(written_of(unpack(envelope, body, exchange=exchange, routing_key=key)), message_id=message_id)
            for message_id, envelope, body, exchange, key in await self._query(HELD)
        ]

    async def next_due(self) -> timedelta | None:
        """Return the time until a held message comes due; None: no message is held."""
        ((wait,),) = await self._query(NEXT_DUE)
        return cast("timedelta | None", wait)

    async def bring_forward(self, time: timedelta) -> None:
        await self._query(BRING_FORWARD, time=time)

    async def consume(self, *, loses_acks: bool = False) -> bool:
        """Run a consumer until all is settled; return whether it paused for an overload, and so left something."""
        setup = self._consumer().setup
        setup.handlers = RecordingHandlers(setup.handlers.by_type, setup.handlers.is_async, self.report.calls)
        setup.judge = RecordingJudge(setup.failures, self.report.failed)
        setup.session = FrozenSession(setup.inbox, setup.outages)
        setup.begun_attempts = BegunAttempts(setup.inbox, setup.session)
        setup.outgoing = cast(CopyPublisher, self._queue)
        channel = MemoryChannel(self._queue, loses_acks=loses_acks)
        running = asyncio.create_task(consume(setup, cast(AbstractChannel, channel), lambda: None), name="harness")
        try:
            while not running.done() and not await self._is_done(setup, channel):
                await asyncio.wait([running], timeout=LOOK_INTERVAL)
            if (overload := setup.gate.reason) is not None:
                self.report.overload = str(overload)
                setup.stop_at_once.set()
            setup.stop.set()
            with suppress(BrokerUnavailableError):  # the connection that was lost with the acknowledgement
                await running
        finally:
            running.cancel()
            await asyncio.wait([running])
            await channel.close()  # what is not settled goes back to the queue
            await setup.session.close()
            self._applied += setup.counters.applied
        self.report.duplicates += setup.counters.duplicates
        return overload is not None

    async def _is_done(self, setup: Setup, channel: MemoryChannel) -> bool:
        if (lost := setup.health.hindrances.get("database")) is not None:
            raise DatabaseUnavailableError(str(lost), public=lost.public)
        if setup.gate.reason is not None:
            return True
        if not channel.is_settled:
            self._waits_for = "messages are delivered and not settled", channel.unsettled
            return False
        due = await self._query(UNDER_WAY) if setup.failures.holds_keys else []
        self._waits_for = "held messages are due, or a handler works on them", due
        return not due

    async def _query(self, statement: LiteralString, **parameters: Any) -> Rows:
        inbox = self._setup.inbox
        fixed = {"consumer": inbox.consumer_name, "no_partition": NO_PARTITION, "frozen": FROZEN}
        return await self._setup.session.run(inbox.statement(statement), {**fixed, **parameters})


@dataclass(frozen=True, slots=True)
class RecordingHandlers(Handlers):
    """Handlers that note which of them was called for which message."""

    noted: list[HandlerCall]

    def calls(self, messages: Iterable[Message]) -> Iterator[tuple[Callable[..., Any], Message | list[Message]]]:
        for function, argument in Handlers.calls(self, messages):
            of_call = argument if isinstance(argument, list) else [argument]
            self.noted.extend(HandlerCall(function, message.message_id) for message in of_call)
            yield function, argument


class RecordingJudge(Judge):
    """A judge that keeps what handlers raised."""

    def __init__(self, policy: FailurePolicy, errors: list[BaseException]) -> None:
        super().__init__(policy)
        self._errors = errors

    def failure(self, error: BaseException, history: History) -> Failure:
        self._errors.append(error)
        return super().failure(error, history)


class FrozenSession(InboxSession):
    """A session that puts each wait of a held message into virtual time."""

    def __init__(self, inbox: Inbox, outages: Outages) -> None:
        super().__init__(inbox, outages)
        self._freeze = inbox.statement(FREEZE)

    async def run(self, statement: Composed, *parameters: Parameters) -> Rows:
        late = [{**each, "wait": FAR} if each.get("wait") else each for each in parameters]
        rows = await super().run(statement, *late)
        for each in parameters:
            if each.get("wait"):  # what becomes a dead letter does not wait; in between it is not due, either
                place = {name: each.get(name) for name in ("consumer", "message_id", "position", "wait")}
                await super().run(self._freeze, {**place, "frozen": FROZEN})
        return rows


async def _require_commit(outbox: Outbox | AsyncOutbox) -> None:
    if not isinstance(outbox, Outbox | AsyncOutbox):
        raise TypeError(f"{type(outbox).__name__} is no outbox: write drain(Outbox(...)) or drain(AsyncOutbox(...))")
    checked = outbox.require_commit()
    if checked is not None:
        await checked


async def _rows(outbox: Outbox | AsyncOutbox) -> list[Written]:
    rows = outbox.all()
    found = rows if isinstance(rows, list) else await rows
    return [row for row in found if row.state == "pending"]
