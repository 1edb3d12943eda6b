"""The errors of this package, as one tree; an expected result is a value (`Outcome`), not an error.

OutboxError
  ConfigurationError      a setting or an argument cannot be used
    MissingExtraError     a library is missing that one of the extras installs
  UsageError              a command does not do what it was asked to do
  EventError              an event that the outbox would refuse (relay.outbox)
  NoTransactionError      events for a connection in autocommit mode, outside of a transaction (relay.outbox)
  NotAwaitedError         events for an asynchronous connection that were not awaited (relay.outbox)
  UnavailableError        no connection to a server
    DatabaseUnavailableError
      InboxUnavailableError
    BrokerUnavailableError
      DeliveryTimeoutError  the broker took back what a consumer had not acknowledged for too long
  SchemaError             the database is reachable, but the tables are missing or behind
  AccessError             the server is reachable, but does not let this user do it
  DeadlineError           no answer in time
  CommitUnknownError      committed on a primary that may have been replaced
  ListenError             the server for probes and metrics cannot listen at its address
  ConsumerError           the consumer cannot go on; nothing was acknowledged that was not applied
    QueueMissingError
    QueueUnfitError       a queue next to the consumed one is missing, or has other arguments
  MessageError            a message that this consumer can never apply, however often it tries
    InvalidPayloadError
    ExpiredMessageError
    MisdatedMessageError
  PartitionLostError      another member of the pool has the partition now
  HandlerError            a handler did what no handler may do
    HandlerResultError    it returned work that is still to be run
    HandlerCancelledError it ended by a CancelledError
    HandlerAbortedError   it raised something that is no Exception
    HandlerTransactionError  it left no transaction to commit
      TransactionEndedError  it committed or rolled back itself
  NotAcceptedError        an event that was neither confirmed nor buffered
  ForkedError             a forked process used what its parent has opened
  MonkeyPatchedError      gevent has patched the process, in which asyncio does not work then
  BufferFileError         a file that cannot be a publisher's buffer
  BusyError               another process is working on it
  NotFoundError           there is nothing with that name or id
  NotReadyError           the relay does not run, or cannot deliver
  PartlyDoneError         a command did a part of what it was asked for
    JobTurnedError        an operator has paused or cancelled the job
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from enum import StrEnum
from typing import Any
from uuid import UUID

MORE_THAN = {"relay": ("console",)}  # extras that bring another one: where one is missing, that one would not do


class PublicReason(StrEnum):
    """Why something does not work, as far as a stranger may know: it names no host, port, user or queue."""

    UNNAMED = "it does not work: see the log"
    # A server cannot be reached.
    NAME_NOT_RESOLVED = "the name is not resolved"
    CONNECTION_REFUSED = "connection refused"
    CONNECTION_RESET = "connection reset"
    CONNECTION_TIMED_OUT = "connection timed out"
    CONNECTION_LOST = "connection lost"
    NO_ROUTE = "No route to host"
    NETWORK_UNREACHABLE = "Network is unreachable"
    TLS_FAILED = "TLS failed"
    # A server answers, and does not do what it is asked for.
    ACCESS_REFUSED = "access refused"
    TOO_MANY_CONNECTIONS = "too many connections"
    SESSION_ENDED = "the server ended the connection"
    CLOSED_UNEXPECTEDLY = "server closed the connection unexpectedly"
    STARTING_UP = "the database system is starting up"
    SHUTTING_DOWN = "the database system is shutting down"
    IN_RECOVERY = "the database system is in recovery mode"
    READ_ONLY = "read only"
    NO_SPACE = "No space left on device"
    LOCK_TIMEOUT = "lock timeout"
    STATEMENT_TIMEOUT = "statement timeout"
    BLOCKED = "broker blocked"
    QUEUE_MISSING = "its queue does not exist"
    QUEUE_GONE = "its queue was deleted or lost its leader"
    DELIVERY_TIMEOUT = "timed out: messages were unacknowledged for longer than the broker's consumer_timeout"
    # The table cannot be written.
    MESSAGE_LOCKED = "has locked message"
    SENT_LOCKED = "has locked message_sent"
    PARKING = "parks or releases rows"
    NO_DAY = "no partition takes the rows sent today"
    STANDING_FAULT = "a statement fails until an operator acts"
    # A process is not ready.
    NAMESAKE = "another relay has its name"
    NOT_CONSUMED = "is not consumed yet"
    ON_ASSIGNED_FAILS = "on_assigned fails"
    NO_CHECK_IN = "the database answers no check-in"


class OutboxError(Exception):
    """Base of every error of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a pool of processes hand it on, whatever its class is made with: one that cannot be hangs the pool."""
        return _as_it_was, (type(self), self.args), self.__dict__


def _as_it_was(kind: type[OutboxError], arguments: tuple[object, ...]) -> OutboxError:
    return kind.__new__(kind, *arguments)


class ConfigurationError(OutboxError):
    """The configuration cannot be used; the message names each key, where it was set, and which values it takes."""


class MissingExtraError(ConfigurationError, ImportError):
    """A library is missing that one of the distribution's extras installs."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f'{library} is not installed: pip install "outbox-relay[{extra}]"')
        self.extra = extra


class UsageError(OutboxError):
    """A command does not do what it was asked to do; nothing was done."""


class EventError(OutboxError, ValueError):
    """The outbox would refuse this event; nothing was sent to the database."""


class UnavailableError(OutboxError):
    """No connection to a server.

    Attributes:
        is_refusal: the server answered, and does not let us in. Waiting helps only if an operator does something.
        public: what strangers may know of the reason.
    """

    def __init__(self, message: str, *, is_refusal: bool = False, public: str = PublicReason.UNNAMED) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal
        self.public = public


class DatabaseUnavailableError(UnavailableError):
    """No connection to PostgreSQL."""


class InboxUnavailableError(DatabaseUnavailableError):
    """The database of a consumer's inbox cannot be reached, or does not take the inbox's rows."""


class SchemaError(OutboxError):
    """The outbox tables are missing, or of another version than this relay."""


class AccessError(OutboxError):
    """The server is reachable, but this user lacks the right."""


class BrokerUnavailableError(UnavailableError):
    """No connection to RabbitMQ."""


class DeliveryTimeoutError(BrokerUnavailableError):
    """A message was unacknowledged for longer than the broker's consumer_timeout: the broker took it back."""

    def __init__(self, queue: str, seconds: float) -> None:
        super().__init__(
            f"timed out: a message of queue {queue!r} was unacknowledged for {seconds:.0f} s, longer than the broker's"
            " consumer_timeout",
            public=PublicReason.DELIVERY_TIMEOUT,
        )


class DeadlineError(OutboxError):
    """A server did not answer in time."""

    def __init__(self, waited_for: str, seconds: float) -> None:
        self.public = no_answer_within(seconds)
        super().__init__(f"{waited_for}: {self.public}")
        self.waited_for = waited_for
        self.seconds = seconds


class CommitUnknownError(OutboxError):
    """The primary stopped waiting for its standby: only the primary has the commit, and a failover may lose it."""

    def __init__(self) -> None:
        super().__init__("the server stopped waiting for its synchronous standby: a failover may undo the commit")


class ListenError(OutboxError):
    """The server for probes and metrics cannot listen at this address."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"http.listen = {address}: {reason}; name another address (RELAY_HTTP_LISTEN), or leave it empty"
        )
        self.address = address


class NotAcceptedError(OutboxError):
    """The publisher knows of no confirm by the broker and of no commit in the buffer for this event.

    There may have been one. Published again as the same `Event`, it has the same message_id, and takes effect once.
    """


class ForkedError(OutboxError):
    """A forked process used an object that its parent has opened: its connections and tasks are the parent's.

    Nothing was done.
    """

    def __init__(self, what: str, opened_by: int, remedy: str = "open one in each process, after the fork") -> None:
        super().__init__(f"{what} was opened by process {opened_by}, and this is its fork {os.getpid()}: {remedy}")
        self.opened_by = opened_by


class MonkeyPatchedError(OutboxError):
    """gevent has patched the process, in which asyncio does not work then; nothing was opened."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} runs in asyncio, and gevent has patched this process (monkey.patch_all). All its greenlets"
            " share one thread, which has one event loop at a time. Open it in a process that is not patched, such as a"
            " worker of gunicorn with `--worker-class gthread`. `relay.outbox.add` works in patched processes"
        )


class BufferFileError(OutboxError):
    """The file cannot be a publisher's buffer; it was left as it is."""


class BusyError(OutboxError):
    """Another process is working on it; nothing was done."""


class NotFoundError(OutboxError):
    """There is nothing with that name or id."""


class NotReadyError(OutboxError):
    """The relay does not run, or cannot deliver."""


class PartlyDoneError(OutboxError):
    """A command did a part of what it was asked for; the message says which, and what stopped it."""


class JobTurnedError(PartlyDoneError):
    """An operator has paused or cancelled the job that ran."""


class ConsumerError(OutboxError):
    """The consumer stopped because going on would lose a message, or because no message would come.

    Attributes:
        public: what strangers may know of the reason.
    """

    public: str = PublicReason.UNNAMED


class QueueMissingError(ConsumerError):
    """The queue to consume from does not exist; consumers do not declare it."""

    public = PublicReason.QUEUE_MISSING

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue!r} does not exist, and a consumer does not declare it: list it and its binding in relay.toml"
            " (`relay config example invoices/relay.toml` is one) and run `relay topology apply`"
        )
        self.queue = queue


class QueueUnfitError(ConsumerError):
    """A queue or exchange that a consumer needs besides the consumed queue is missing, or has other arguments.

    Nothing was consumed.
    """

    def __init__(self, kind: str, name: str, words: str, arguments: Mapping[str, Any]) -> None:
        super().__init__(
            f"{kind} {name!r} {words or 'does not exist'}: declare it, durable, with the arguments {dict(arguments)}."
            " Or let the consumer declare it at its start (declare=True), which needs the permission to configure it"
        )
        self.queue = name
        self.arguments = arguments
        self.public = PublicReason.UNNAMED if words else PublicReason.QUEUE_MISSING


class PartitionLostError(OutboxError):
    """Another member of the pool has the partition, or is about to get it; nothing was applied."""


class MessageError(OutboxError):
    """This consumer can never apply this message, however often it tries; nothing of it was kept."""


class InvalidPayloadError(MessageError):
    """The body does not fit the handler's annotation; the message has places and kinds of the faults, but no values."""

    def __init__(self, event_type: str, message_id: UUID, faults: str) -> None:
        super().__init__(f"{event_type} {message_id}: the body does not fit what its handler takes: {faults}")
        self.event_type = event_type
        self.message_id = message_id
        self.faults = faults


class ExpiredMessageError(MessageError):
    """The inbox has forgotten the message's day: it does not know whether the message was applied."""

    def __init__(self, event_type: str, message_id: UUID, day: date, remembered_since: date) -> None:
        super().__init__(
            f"{event_type} {message_id} was written on {day}, and the inbox remembers messages only since"
            f" {remembered_since}: it does not know whether this one was applied"
        )
        self.event_type = event_type
        self.message_id = message_id
        self.day = day
        self.remembered_since = remembered_since


class MisdatedMessageError(MessageError):
    """The message's timestamp is further ahead than clocks differ; the inbox makes no day for it."""

    def __init__(self, event_type: str, message_id: UUID, day: date, last_day: date) -> None:
        super().__init__(
            f"{event_type} {message_id} says that it was written on {day}; the inbox takes messages up to"
            f" {last_day}: correct the sender's clock, and send the message again"
        )
        self.event_type = event_type
        self.message_id = message_id
        self.day = day
        self.last_day = last_day


class HandlerError(OutboxError):
    """A handler did what no handler may do; nothing of its work is kept."""


class HandlerResultError(HandlerError):
    """A handler returned work that is still to be run, such as a coroutine or a generator."""

    def __init__(self, function: str, kind: str) -> None:
        super().__init__(
            f"{function} returned a {kind}, which the consumer does not run: run it to its end in the function."
            " A function that awaits must be `async def`, and so must the decorators around it"
        )
        self.function = function
        self.kind = kind


class HandlerCancelledError(HandlerError):
    """A handler ended by a CancelledError, and the consumer had not cancelled it."""

    def __init__(self) -> None:
        super().__init__("the handler was cancelled by something that it waited for")


class HandlerAbortedError(HandlerError):
    """A handler raised something that is no failure but ends its task or thread, such as GeneratorExit."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"it raised {type(error).__name__}, which no task can handle: raise another Exception in its place"
        )


class HandlerTransactionError(HandlerError):
    """A handler returned, and its transaction cannot be committed."""


class TransactionEndedError(HandlerTransactionError):
    """A handler committed or rolled back the transaction: the inbox row no longer shows whether its work was kept."""

    def __init__(self) -> None:
        super().__init__(
            "the handler has ended the transaction: leave commit and rollback to the consumer. If it has committed, the"
            " inbox knows the message, and absorbs it when it comes again"
        )


def no_answer_within(seconds: float) -> str:
    """Return the words for a server that was silent for this long; they name nothing."""
    return f"no answer within {seconds:g} s"


@contextmanager
def importing(extra: str) -> Iterator[None]:
    """Run imports that need the libraries of an extra.

    Raises:
        MissingExtraError: a library is missing; the error names the extra that installs it.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, MissingExtraError) and error.extra in MORE_THAN.get(extra, ()):
            raise
        first: BaseException = error
        # The cause is the error of an inner block, or the one that cyclopts wraps when it imports a command's module.
        while isinstance(first.__cause__, ImportError):
            first = first.__cause__
        library = (first.name or "").partition(".")[0] if isinstance(first, ModuleNotFoundError) else ""
        if library in ("", "relay"):  # no extra would repair this fault
            raise
        raise MissingExtraError(library, extra) from error


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors in a group and in the groups inside it, first to last."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
