"""What transactions on psycopg's two kinds of connection have in common: everything but who waits for the answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from relay.consume.admission import Admission, require_fence
from relay.consume.days import MAKE_DAYS, lacks_day
from relay.consume.handlers import Handlers
from relay.consume.inbox import Inbox
from relay.consume.message import Delivery, Message
from relay.database import one_line, unplug
from relay.errors import HandlerTransactionError, InboxUnavailableError

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

    @property
    def is_lost(self) -> bool:
        return self._connection is None or self._connection.closed

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
        """
        require_fence(remembered)
        fresh = {message_id for message_id, is_admitted in remembered if is_admitted}
        return self._handlers.calls(_take(batch, fresh))

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


def require_transaction(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
    """See that there is something to commit: where there is not, COMMIT rolls back, and the server calls it no error.

    Raises:
        HandlerTransactionError: the handler has ended the transaction, or went on after a statement had failed.
    """
    if (status := connection.pgconn.transaction_status) != TransactionStatus.INTRANS:
        raise HandlerTransactionError(is_failed=status == TransactionStatus.INERROR)


def _take(batch: Sequence[Delivery], fresh: set[UUID]) -> Iterator[Message]:
    """Give the messages to apply, in order, each once: a batch may hold one twice."""
    for delivery in batch:
        if delivery.message.message_id in fresh:
            fresh.remove(delivery.message.message_id)
            yield delivery.message
