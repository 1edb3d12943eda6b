"""Apply messages once: the inbox row and the handler's work in one transaction.

A message whose inbox row exists was applied and committed before, and is not applied again. So a message may be
delivered any number of times, and the answer to a commit may be lost. After a lost connection the consumer tries again.

`AsyncTransactions` and `ThreadTransactions` apply on one connection. `Attempt` uses them, and waits while the database
is unreachable. That wait counts as no attempt at a message.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, time
from typing import Any, Generic, NoReturn, Protocol, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import Composed
from psycopg.transaction import OutOfOrderTransactionNesting

from relay.consume.apply.handlers import Handlers, call, call_async, in_own_task
from relay.consume.apply.inbox import (
    MAKE_DAYS,
    Admission,
    Applied,
    Inbox,
    applied_of,
    days_of,
    lacks_day,
    mark_of,
    refused_day_named,
    require_fence,
)
from relay.consume.apply.partition_state import PartitionState
from relay.consume.classify import Judge, first_line, name_of
from relay.consume.counters import Counters
from relay.consume.database_faults import DatabaseFault, cause_of, fault_of
from relay.consume.hindrances import Outages, Overloaded, Stay
from relay.consume.message import Delivery, Message
from relay.consume.policies import FailureClass
from relay.errors import (
    DatabaseUnavailableError,
    HandlerError,
    HandlerTransactionError,
    InboxUnavailableError,
    PartitionLostError,
    TransactionEndedError,
)
from relay.logger import get_logger
from relay.runtime.backoff import Backoff, Stopping, raise_if_set, wait_for_event
from relay.runtime.threads import call_in_daemon
from relay.servers.postgres.database import (
    CANCEL_TIMEOUT,
    SESSION_SETTINGS,
    SET_EACH,
    connect,
    connect_async,
    is_finished,
    is_lent,
    one_line,
    public_reason,
    set_own,
    unplug,
)

log = get_logger("relay.consume")

# What bounds a handler's statements, where it finds its tables, and its time zone are the application's to say.
OF_HANDLERS = SESSION_SETTINGS | {"idle_session_timeout": "0"}
# Where a pooler lends the session, each transaction sets these for itself, and begins with its isolation.
OF_LENT = {name: value for name, value in SESSION_SETTINGS.items() if name != "default_transaction_isolation"}

Connection = TypeVar("Connection", psycopg.Connection, psycopg.AsyncConnection)
Parameters = Mapping[str, Any]


class ConnectionTransactions(Generic[Connection]):
    """A connection that may be lost, and what both kinds of transactions do on it."""

    def __init__(self, inbox: Inbox, handlers: Handlers, admission: Admission) -> None:
        self._inbox = inbox
        self._handlers = handlers
        self._remember = admission.statement(inbox).as_bytes()  # else psycopg puts it together for each batch
        self._make_days = inbox.statement(MAKE_DAYS)
        self._connection: Connection | None = None
        self._doubtful: set[UUID] = set()  # messages whose transaction a handler has ended: they may be committed

    @property
    def is_lost(self) -> bool:
        return self._connection is None or self._connection.closed

    @property
    def is_free(self) -> bool:
        return self._connection is not None and self._connection.info.transaction_status is TransactionStatus.IDLE

    def unplug(self) -> None:
        if self._connection is not None:
            unplug(self._connection)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise psycopg.OperationalError("not connected")
        return self._connection

    def _arrived(self, batch: Sequence[Delivery]) -> Parameters:
        """Return the parameters of `inbox.REMEMBER`."""
        return {
            "consumer": self._inbox.consumer_name,
            "message_ids": [delivery.message.identity for delivery in batch],
            "plain_ids": [delivery.message.message_id for delivery in batch] if self._inbox.by_writer else None,
            "days": [delivery.message.day for delivery in batch],
            "business_keys": [delivery.message.aggregate_id for delivery in batch],
            "keys": [delivery.key for delivery in batch],
        }

    def _calls(
        self, batch: Sequence[Delivery], remembered: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[Callable[..., Any], Message | list[Message]]]:
        """Return the handlers' calls for the messages that were not known, in order, each once.

        Raises:
            PartitionLostError: another member holds the partition now.
            TransactionEndedError: a message is known only because a handler committed before the message was applied.
        """
        require_fence(remembered)
        fresh = _fresh(remembered)
        doubtful = self._doubtful.intersection(delivery.message.identity for delivery in batch)
        self._doubtful -= doubtful
        if doubtful - fresh:
            raise TransactionEndedError
        return self._handlers.calls(_take(batch, fresh))

    @contextmanager
    def _in_handlers(self, connection: Connection, remembered: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Check that handlers leave the transaction open. If they do not, the handler failed; it is no outage.

        Raises:
            HandlerTransactionError: a handler closed the connection, ended the transaction, or left it in a state that
                cannot be committed.
            psycopg.OperationalError: the connection is lost.
        """
        mark = mark_of(connection)
        try:
            yield
        except Exception as error:
            self._require_ours(connection, mark, remembered)
            if isinstance(cause_of(error), errors.InvalidSavepointSpecification) and mark_of(connection) != mark:
                self._raise_ended(remembered)  # the savepoint went with the transaction
            raise
        self._require_ours(connection, mark, remembered)
        _require_open(connection)

    def _require_ours(self, connection: Connection, mark: str | None, remembered: Sequence[tuple[Any, ...]]) -> None:
        if (connection.closed and not connection.broken) or is_finished(connection):
            raise HandlerTransactionError("the handler has closed its connection: leave that to the consumer")
        status = connection.info.transaction_status
        if status is TransactionStatus.IDLE or (status is TransactionStatus.INTRANS and mark_of(connection) != mark):
            self._raise_ended(remembered)

    def _raise_ended(self, remembered: Sequence[tuple[Any, ...]]) -> NoReturn:
        self._doubtful |= _fresh(remembered)
        raise TransactionEndedError

    def _lacks_day(self, error: errors.CheckViolation) -> bool:
        return lacks_day(error, self._inbox.schema)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Raise errors of the block as InboxUnavailableError: neither a handler nor a message caused them.

        A missing day is raised as it is.
        """
        try:
            yield
        except psycopg.Error as error:
            if isinstance(error, errors.CheckViolation) and self._lacks_day(error):
                raise
            raise InboxUnavailableError(one_line(error), public=public_reason(error)) from error


def _require_open(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
    """Check that the transaction can be committed: else COMMIT rolls back, and the server reports no error."""
    status = connection.info.transaction_status
    if status is TransactionStatus.INERROR:
        raise HandlerTransactionError(
            "a statement of the handler failed, and the handler went on: let the error propagate, or run the statement"
            " in a savepoint"
        )
    if status is TransactionStatus.ACTIVE:
        raise HandlerTransactionError("a statement of the handler still runs: await it in the handler")
    if connection.closed:
        raise psycopg.OperationalError("the connection was lost, and the handler went on")


def _fresh(remembered: Sequence[tuple[Any, ...]]) -> set[UUID]:
    return {message_id for message_id, is_admitted in remembered if is_admitted}


def _take(batch: Sequence[Delivery], fresh: set[UUID]) -> Iterator[Message]:
    """Yield the messages to apply, in order, each once: a batch may hold a message twice."""
    for delivery in batch:
        if delivery.message.identity in fresh:
            fresh.remove(delivery.message.identity)
            yield delivery.message


Result = TypeVar("Result")
Statement = Composed | bytes
Rows = list[tuple[Any, ...]]

NOTHING: Sequence[Parameters] = ({},)


class Transactions(Protocol):
    """One database connection that applies batches, one transaction each."""

    async def open(self) -> None:
        """Connect; an open connection is closed first. Raises DatabaseUnavailableError."""

    async def close(self) -> None: ...

    def unplug(self) -> None:
        """End every wait on the connection at once."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost: then the handler did not cause an error of `apply`."""

    @property
    def is_free(self) -> bool:
        """Whether it is connected, and in no transaction: the next one would become part of one that is still open."""

    async def apply(self, batch: Sequence[Delivery]) -> Applied:
        """Apply and commit, in order, the messages that are admitted and were not applied before.

        Raises:
            InboxUnavailableError: the database did not take a statement of the consumer.
            ExpiredMessageError, MisdatedMessageError: the inbox has no day for a message, and makes no such day.
            PartitionLostError: another member of the pool has the partition.
            Exception: any exception of a handler or of the commit.
            In every case nothing is applied, or (only when `is_lost`) maybe all.
        """

    async def execute(self, statement: Composed, *parameters: Parameters) -> Rows:
        """Run a statement once with each of these parameters, or once without, in a separate transaction.

        Returns the rows of the last run. Raises psycopg.Error, and TimeoutError: the statement may have been done.
        """


class AsyncTransactions(ConnectionTransactions[psycopg.AsyncConnection]):
    """For `async def` handlers."""

    def __init__(self, inbox: Inbox, handlers: Handlers, admission: Admission, pipeline: bool) -> None:
        super().__init__(inbox, handlers, admission)
        self._pipeline = pipeline

    async def open(self) -> None:
        await self.close()
        self._connection = await connect_async(
            self._inbox.database, session=OF_HANDLERS, may_be_lent=True, **self._inbox.connection_options
        )
        await self._connection.set_autocommit(False)  # else a handler's work after its own ROLLBACK would be committed

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def apply(self, batch: Sequence[Delivery]) -> Applied:
        try:
            return await self._apply(batch)
        except errors.CheckViolation as error:
            if not self._lacks_day(error):
                raise
        with self._ours(), refused_day_named(batch):
            await self.execute(self._make_days, {"days": days_of(batch)})
        return await self._apply(batch)

    async def execute(self, statement: Composed, *parameters: Parameters) -> Rows:
        async with self._bounded(), self._begin() as (connection, _):
            return await self._rows(connection, statement, parameters)

    async def _apply(self, batch: Sequence[Delivery]) -> Applied:
        # The consumer's own statements (begin, remember, commit) are bounded; a handler may take as long as it needs.
        async with self._bounded() as deadline, self._begin() as (connection, given):
            with self._ours():
                remembered = await self._rows(connection, self._remember, [self._arrived(batch)])
            deadline.reschedule(None)
            try:
                with self._in_handlers(connection, remembered):
                    async with connection.pipeline() if self._pipeline else nullcontext():
                        await in_own_task(self._handle(batch, remembered, given))
            finally:
                deadline.reschedule(asyncio.get_running_loop().time() + self._inbox.statement_timeout)
        return applied_of(remembered)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[asyncio.Timeout]:
        """Close the connection when the block takes too long.

        Neither statement_timeout nor tcp_user_timeout ends a COMMIT that waits for a lost standby.
        """
        connection = self._connected()
        try:
            async with asyncio.timeout(self._inbox.statement_timeout) as deadline:
                yield deadline
        except TimeoutError:
            if deadline.expired():
                await connection.close()
            raise

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[tuple[psycopg.AsyncConnection, Any]]:
        """Begin a transaction, and commit it at the end of the block; yield the connection, and what handlers get."""
        connection = self._connected()
        async with connection.transaction():
            if is_lent(connection):
                await connection.execute(SET_EACH, set_own(OF_LENT, is_local=True))
            yield connection, connection

    @staticmethod
    async def _rows(
        connection: psycopg.AsyncConnection, statement: Statement, parameters: Sequence[Parameters]
    ) -> Rows:
        async with connection.cursor(binary=True, row_factory=tuple_row) as cursor:
            for values in parameters or NOTHING:
                await cursor.execute(statement, values)
            return await cursor.fetchall() if cursor.description else []

    async def _handle(self, batch: Sequence[Delivery], remembered: Sequence[tuple[Any, ...]], given: Any) -> None:
        for handler, argument in self._calls(batch, remembered):
            await self._call(handler, argument, given)

    def _call(self, handler: Callable[..., Any], argument: Any, given: Any) -> Awaitable[None]:
        return call_async(handler, argument, given)


class ThreadTransactions(ConnectionTransactions[psycopg.Connection]):
    """For plain functions: each transaction runs in a thread."""

    async def open(self) -> None:
        await self.close()
        opens = partial(
            connect, self._inbox.database, session=OF_HANDLERS, may_be_lent=True, **self._inbox.connection_options
        )
        self._connection = await call_in_daemon(opens, name="connect", discard=psycopg.Connection.close)
        self._connection.autocommit = False  # as above

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def apply(self, batch: Sequence[Delivery]) -> Applied:
        return await self._in_thread(self._apply, batch)

    async def execute(self, statement: Composed, *parameters: Parameters) -> Rows:
        async with asyncio.timeout(self._inbox.statement_timeout):
            return await self._in_thread(self._execute, statement, parameters)

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        connection = self._connected()
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be ended. Its statement can, and the handler sees that as an error.
            try:
                with suppress(psycopg.Error):
                    await asyncio.to_thread(connection.cancel_safe, timeout=CANCEL_TIMEOUT)
                await asyncio.wait([work], timeout=CANCEL_TIMEOUT)
            finally:  # also when it is cancelled once more: the thread must not use a connection that is closed here
                unplug(connection)  # a server that does not answer cancels nothing; any other has ended the transaction
                await asyncio.wait([work])
            raise

    def _apply(self, batch: Sequence[Delivery]) -> Applied:
        try:
            return self._apply_once(batch)
        except errors.CheckViolation as error:
            if not self._lacks_day(error):
                raise
        with self._ours(), refused_day_named(batch):
            self._execute(self._make_days, [{"days": days_of(batch)}])
        return self._apply_once(batch)

    def _execute(self, statement: Composed, parameters: Sequence[Parameters]) -> Rows:
        with self._begin() as (connection, _):
            return self._rows(connection, statement, parameters)

    def _apply_once(self, batch: Sequence[Delivery]) -> Applied:
        with self._begin() as (connection, given):
            with self._ours():
                remembered = self._rows(connection, self._remember, [self._arrived(batch)])
            with self._in_handlers(connection, remembered):
                for handler, argument in self._calls(batch, remembered):
                    self._call(handler, argument, given)
        return applied_of(remembered)

    def _call(self, handler: Callable[..., Any], argument: Any, given: Any) -> None:
        call(handler, argument, given)

    @contextmanager
    def _begin(self) -> Iterator[tuple[psycopg.Connection, Any]]:
        """Begin a transaction, and commit it at the end of the block; yield the connection, and what handlers get."""
        connection = self._connected()
        with connection.transaction():
            if is_lent(connection):
                connection.execute(SET_EACH, set_own(OF_LENT, is_local=True))
            yield connection, connection

    @staticmethod
    def _rows(connection: psycopg.Connection, statement: Statement, parameters: Sequence[Parameters]) -> Rows:
        with connection.cursor(binary=True, row_factory=tuple_row) as cursor:
            for values in parameters or NOTHING:
                cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else []


# The handler did what no handler may do, or left its own transaction() block open.
BY_HANDLER = (HandlerError, OutOfOrderTransactionNesting)

# For errors of a session, or conflicts with another transaction.
REPEAT_FOR = 10.0  # seconds, from the first such error on; then it counts as an attempt
REPEAT_BACKOFF = Backoff(initial=0.02, maximum=0.25)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The attempts at messages on one database connection."""

    transactions: Transactions
    judge: Judge
    counters: Counters
    outages: Outages
    stopping: asyncio.Event
    state: PartitionState | None = None

    async def apply(self, batch: Sequence[Delivery], entry: Stay) -> Applied | Overloaded:
        """Apply a batch in one transaction; repeat it after each error of the database that no message has caused.

        Raises:
            Stopping: the consumer stops, before the database is reachable again or because another member has the
                partition. Nothing was applied, unless the answer to a commit was lost; no attempt counts.
            Exception: the exception of a handler; nothing was applied.
        """
        repeats, repeat_until = 0, 0.0
        with self.outages.begin() as outage:
            while not (outage.failures and self.stopping.is_set()):
                begun_at = monotonic()
                try:
                    applied = await self._apply(batch)
                except PartitionLostError:
                    await self.stopping.wait()  # the next check-in finds it, too, and stops this consumer
                    raise Stopping from None
                except Exception as error:  # a handler may raise anything
                    is_outage, fault = self._is_outage(error), fault_of(error)
                    if is_outage or fault is DatabaseFault.SESSION or isinstance(error, BY_HANDLER):
                        # A handler may have left settings in the session, or a statement that still runs.
                        await self.transactions.close()
                    if is_outage:
                        await outage.wait(error, self.stopping)
                        continue
                    if self.judge.is_passing(error):
                        repeat_until = repeat_until or monotonic() + REPEAT_FOR
                        if monotonic() < repeat_until:
                            repeats += 1
                            await self._wait_to_repeat(batch, error, repeats)
                            continue
                    if self.judge.class_of(error) is not FailureClass.OVERLOAD:
                        raise
                    self.counters.overloads += 1
                    entry.overloaded(f"{name_of(error)}: {first_line(error)}")
                    return Overloaded()
                outage.end()
                self.counters.times.observe(monotonic() - begun_at)
                self._count(batch, applied)
                if applied.count:
                    entry.succeeded()
                return applied
        raise Stopping

    async def connect(self) -> None:
        """Connect unless it is connected; raises DatabaseUnavailableError."""
        if not self.transactions.is_free:
            await self.transactions.open()

    async def close(self) -> None:
        await self.transactions.close()

    async def _apply(self, batch: Sequence[Delivery]) -> Applied:
        await self.connect()
        async with self.state.used() if self.state else nullcontext():
            self.counters.in_flight += 1
            try:
                return await self.transactions.apply(batch)
            finally:
                self.counters.in_flight -= 1

    def _is_outage(self, error: Exception) -> bool:
        fault = fault_of(error)
        if fault is DatabaseFault.DURATION or isinstance(error, BY_HANDLER):
            return False  # here, too, the session is lost, but the handler has caused that
        return isinstance(error, DatabaseUnavailableError) or self.transactions.is_lost or fault is DatabaseFault.OUTAGE

    async def _wait_to_repeat(self, batch: Sequence[Delivery], error: Exception, repeats: int) -> None:
        """Wait until it is time for the next try, which does not count as an attempt. Raises Stopping."""
        self.counters.repeated += 1
        if repeats == 1:
            reason = f"{name_of(error)}: {first_line(error)}"
            log.warning("batch.repeated", messages=len(batch), fault=fault_of(error).value, reason=reason)
        await wait_for_event(self.stopping, REPEAT_BACKOFF.seconds(repeats))
        raise_if_set(self.stopping)

    def _count(self, batch: Sequence[Delivery], applied: Applied) -> None:
        left = sum(delivery.message.identity in applied.left for delivery in batch) if applied.left else 0
        duplicates = len(batch) - left - applied.count
        self.counters.applied += applied.count
        self.counters.duplicates += duplicates
        if applied.count and (written_at := batch[-1].message.timestamp) is not None:
            self.counters.last_age = max(0.0, time() - written_at.timestamp())
        log.debug("batch.applied", messages=applied.count, duplicates=duplicates)
