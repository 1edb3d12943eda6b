"""What transactions on psycopg's two kinds of connection have in common: everything but who waits for the answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from relay.consume.apply.days import MAKE_DAYS, lacks_day
from relay.consume.apply.handlers import Handlers
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_insert import Admission, mark_of, require_fence
from relay.consume.classify import cause_of
from relay.consume.message import Delivery, Message
from relay.database import one_line, unplug
from relay.errors import HandlerTransactionError, InboxUnavailableError, TransactionEndedError

Connection = TypeVar("Connection", psycopg.Connection, psycopg.AsyncConnection)
Parameters = Mapping[str, Any]


class Connected(Generic[Connection]):
    """A connection that may be gone, and what is done on it, whoever waits for the answers."""

    def __init__(self, inbox: Inbox, handlers: Handlers, admission: Admission) -> None:
        self._inbox = inbox
        self._handlers = handlers
        self._remember = admission.statement(inbox).as_bytes()  # else psycopg puts it together for each batch
        self._make_days = inbox.statement(MAKE_DAYS)
        self._connection: Connection | None = None
        self._doubtful: set[UUID] = set()  # of transactions that handlers have ended: they may be committed

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
        """Give the parameters of `admission.REMEMBER`."""
        return {
            "consumer": self._inbox.consumer_name,
            "message_ids": [delivery.message.message_id for delivery in batch],
            "days": [delivery.message.day for delivery in batch],
            "business_keys": [delivery.message.aggregate_id for delivery in batch],
            "keys": [delivery.key for delivery in batch],
        }

    def _calls(
        self, batch: Sequence[Delivery], remembered: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[Callable[..., Any], Message | list[Message]]]:
        """Give the handlers' calls for the messages that were not known, in order, each once.

        Raises:
            PartitionLostError: they are somebody else's by now.
            TransactionEndedError: one is known, because a handler has committed before it was applied.
        """
        require_fence(remembered)
        fresh = _fresh(remembered)
        doubtful = self._doubtful.intersection(delivery.message.message_id for delivery in batch)
        self._doubtful -= doubtful
        if doubtful - fresh:
            raise TransactionEndedError
        return self._handlers.calls(_take(batch, fresh))

    @contextmanager
    def _in_handlers(self, connection: Connection, remembered: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """See that handlers leave the transaction as it was; else they have failed, and it is no outage.

        Raises:
            HandlerTransactionError: they have closed the connection, ended the transaction, or left it in no state to
                be committed.
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
        if connection.closed and not connection.broken:
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
        """What fails in here is no handler's fault, and no message's; but for a day that is missing."""
        try:
            yield
        except psycopg.Error as error:
            if isinstance(error, errors.CheckViolation) and self._lacks_day(error):
                raise
            raise InboxUnavailableError(one_line(error)) from error


def _require_open(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
    """See that there is something to commit: else COMMIT rolls back, and the server calls it no error."""
    status = connection.info.transaction_status
    if status is TransactionStatus.INERROR:
        raise HandlerTransactionError(
            "a statement of the handler failed, and it went on: let the error out, or run the statement in a savepoint"
        )
    if status is TransactionStatus.ACTIVE:
        raise HandlerTransactionError("a statement of the handler still runs: await in there what it begins")
    if connection.closed:
        raise psycopg.OperationalError("the connection was lost, and the handler went on")


def _fresh(remembered: Sequence[tuple[Any, ...]]) -> set[UUID]:
    return {message_id for message_id, is_admitted in remembered if is_admitted}


def _take(batch: Sequence[Delivery], fresh: set[UUID]) -> Iterator[Message]:
    """Give the messages to apply, in order, each once: a batch may hold one twice."""
    for delivery in batch:
        if delivery.message.message_id in fresh:
            fresh.remove(delivery.message.message_id)
            yield delivery.message
