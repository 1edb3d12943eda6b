"""What can go wrong, as one tree; an expected result is a value (`Outcome`), not an error.

OutboxError
  ConfigurationError      the relay was told something that cannot be
  UsageError              a command was asked for something that it does not do
  EventError              an event that the outbox would refuse (relay.outbox)
  DatabaseUnavailableError
    InboxUnavailableError
  SchemaError             the database is reachable, but the tables are missing or behind
  AccessError             the database is reachable, but does not let this role do it
  BrokerUnavailableError
  DeadlineError           no answer in time
  CommitUnknownError      committed on a primary that may have been replaced
  ListenError             the address for probes and metrics cannot be had
  ConsumerError           the consumer cannot go on; nothing was acknowledged that was not applied
    QueueMissingError
    UnhandledMessageError a message that nobody can apply
  HandlerCancelledError   a handler ended itself by CancelledError
  BusyError               somebody else is at it
  NotFoundError           nothing of that name or id is there
  NotReadyError           the relay does not run, or cannot deliver
  PartlyDoneError         a command did a part of what it was asked for
"""

from collections.abc import Iterator


class OutboxError(Exception):
    """Base of every error of this package."""


class ConfigurationError(OutboxError):
    """The configuration cannot be used; the message names each key, where it was set, and what it takes."""


class UsageError(OutboxError):
    """A command was asked for something that it does not do; nothing was done."""


class EventError(OutboxError, ValueError):
    """The outbox would refuse this event; nothing was sent to the database."""


class DatabaseUnavailableError(OutboxError):
    """No connection to PostgreSQL."""


class InboxUnavailableError(DatabaseUnavailableError):
    """No connection to the database of a consumer's inbox, which is not the outbox's."""


class SchemaError(OutboxError):
    """The outbox tables are missing, or of another version than this relay."""


class AccessError(OutboxError):
    """The database is reachable, but does not let this role do what was asked for."""


class BrokerUnavailableError(OutboxError):
    """No connection to RabbitMQ."""


class DeadlineError(OutboxError):
    """Something on the network did not answer in time."""

    def __init__(self, waited_for: str, seconds: float) -> None:
        super().__init__(f"{waited_for}: no answer within {seconds:g} s")
        self.waited_for = waited_for
        self.seconds = seconds


class CommitUnknownError(OutboxError):
    """The primary stopped waiting for its standby: what was committed is known to it alone, and may be gone soon."""

    def __init__(self) -> None:
        super().__init__("the server stopped waiting for its synchronous standby: a failover may undo the commit")


class ListenError(OutboxError):
    """Nobody can be answered at this address."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"http.listen = {address}: {reason}; name another address (RELAY_HTTP__LISTEN), or an empty one for none"
        )
        self.address = address


class BusyError(OutboxError):
    """Somebody else is at it; nothing was done."""


class NotFoundError(OutboxError):
    """Nothing of that name or id is there."""


class NotReadyError(OutboxError):
    """The relay does not run, or cannot deliver."""


class PartlyDoneError(OutboxError):
    """A command did a part of what it was asked for; the message tells which, and what stopped it."""


class ConsumerError(OutboxError):
    """The consumer stopped because going on would lose a message or none would come."""


class QueueMissingError(ConsumerError):
    """The queue to consume from does not exist; consumers declare nothing."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} does not exist; create it and bind it, a consumer declares nothing")
        self.queue = queue


class UnhandledMessageError(ConsumerError):
    """A message that this consumer cannot apply; it is still in the queue."""

    def __init__(self, queue: str, reason: str) -> None:
        super().__init__(f"queue {queue!r}: stopped at a message that cannot be applied and stays there: {reason}")
        self.queue = queue
        self.reason = reason


class HandlerCancelledError(OutboxError):
    """A handler let a CancelledError out that did not come from us."""

    def __init__(self) -> None:
        super().__init__("the handler was cancelled by something that it waited for")


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Give the errors in a group and in the groups inside it, first to last."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
