"""What a failure means: its class, and what the consumer does with the message.

    raise Permanent("the invoice was cancelled")   to the dead letters, at once
    raise Transient("the shop is closed")          again later, a number of times
    raise Overload("429 from the tax office")      everything pauses until a try succeeds; it counts as no attempt

Any other exception is unclassified, unless the policy of the consumer names its class: again later, a number of times.
An error that the database reports about itself is no failure of a message: see `database_faults`.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import assert_never

import psycopg

from relay.consume.database_faults import PASSING, cause_of, fault_of
from relay.consume.message import Delivery
from relay.consume.policies import FailureClass, FailurePolicy
from relay.errors import (
    ExpiredMessageError,
    InvalidPayloadError,
    MessageError,
    MisdatedMessageError,
    OutboxError,
    TransactionEndedError,
)
from relay.logger import get_logger
from relay.observe.printable import printable
from relay.runtime.scrub import scrub

log = get_logger("relay.consume")

CALLS = "relay.consume.apply.handlers"  # the module that calls handlers and hooks
LONGEST_WORDS = 300  # characters of an exception's first line; what follows it may show values


class Permanent(OutboxError):  # noqa: N818  (it says what a handler means; no part of the relay has failed)
    """Raised by a handler: the message can never be applied."""


class Transient(OutboxError):  # noqa: N818
    """Raised by a handler: the message can be applied later."""


class Overload(OutboxError):  # noqa: N818
    """Raised by a handler: a service that all messages need is overloaded."""


class Reason(StrEnum):
    """Why a message is a dead letter."""

    PERMANENT = "permanent"  # its handler said so
    EXHAUSTED = "exhausted"  # it has failed in its last attempt
    POISONED = "poisoned"  # processes died while they worked on it
    UNHANDLED = "unhandled"  # no handler takes its type
    INVALID = "invalid"  # it is no message of the outbox, its body does not fit its handler, or its day is ahead
    EXPIRED = "expired"  # the inbox has forgotten its day


REASONS = {
    InvalidPayloadError: Reason.INVALID,
    MisdatedMessageError: Reason.INVALID,
    ExpiredMessageError: Reason.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class History:
    """The failed attempts of a message."""

    attempts: int = 0  # attempts that failed
    first_failed_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The last failure of a message, and what follows from it."""

    attempts: int  # failed attempts, this one included
    first_failed_at: datetime
    failed_at: datetime
    exception: str  # its class
    words: str
    reason: Reason | None  # why it is a dead letter; None: it is tried again
    step: float = 0.0  # the longest wait until the next try, in seconds
    wait: float = 0.0  # the wait that chance has chosen, in seconds
    most_attempts: int | None = None  # None: the number of attempts does not decide

    @property
    def error(self) -> str:
        """Return the class of the exception, if there was one, and the first line of its message."""
        return f"{self.exception}: {self.words}".removeprefix(": ")

    @property
    def outlook(self) -> str:
        """Return which attempt it was, and what follows."""
        tries = f"try {self.attempts}" if self.most_attempts is None else f"try {self.attempts} of {self.most_attempts}"
        return f"{tries}, again in {self.wait:.2g} s" if self.reason is None else f"{tries}, {self.reason.value}"


class Judge:
    """Decides what an error means, by a consumer's policy."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._retries = {
            FailureClass.UNCLASSIFIED: policy.retries,
            FailureClass.TRANSIENT: policy.transient_retries or policy.retries,
        }
        named = policy.classes()
        self._named = named.keys()
        self._classes: dict[type, FailureClass] = {
            Permanent: FailureClass.PERMANENT,
            Transient: FailureClass.TRANSIENT,
            Overload: FailureClass.OVERLOAD,
            MessageError: FailureClass.PERMANENT,
            # The handler may have committed the inbox row: then the next try would have no effect.
            TransactionEndedError: FailureClass.PERMANENT,
            psycopg.errors.SerializationFailure: FailureClass.TRANSIENT,
            psycopg.errors.DeadlockDetected: FailureClass.TRANSIENT,
        } | named

    @property
    def steps(self) -> list[float]:
        """Return every wait between two tries, ascending, each once."""
        return sorted({step for retries in self._retries.values() for step in retries.steps()})

    def class_of(self, error: BaseException) -> FailureClass:
        """Return the class of an error: by its type, or by the nearest base class that is known."""
        kinds = (*type(error).__mro__, *type(cause_of(error)).__mro__)
        return next((self._classes[each] for each in kinds if each in self._classes), FailureClass.UNCLASSIFIED)

    def is_passing(self, error: BaseException) -> bool:
        """Whether a session or another transaction has caused the error, and the policy does not name its class."""
        return fault_of(error) in PASSING and self._named.isdisjoint((type(error), type(cause_of(error))))

    def failure(self, error: BaseException, history: History) -> Failure:
        """Return what follows from an error that is no overload."""
        attempts = history.attempts + 1
        failure_class = self.class_of(error)
        match failure_class:
            case FailureClass.PERMANENT:
                return _failure(error, history, reason=REASONS.get(type(error), Reason.PERMANENT))
            case FailureClass.TRANSIENT | FailureClass.UNCLASSIFIED:
                retries = self._retries[failure_class]
                if attempts >= retries.attempts:
                    return _failure(error, history, reason=Reason.EXHAUSTED, most_attempts=retries.attempts)
                step, wait = retries.step(attempts), retries.wait(attempts)
                return _failure(error, history, step=step, wait=wait, most_attempts=retries.attempts)
            case FailureClass.OVERLOAD:
                raise AssertionError("an overload is no failure of a message")
            case _:
                assert_never(failure_class)


def _failure(
    error: BaseException,
    history: History,
    *,
    reason: Reason | None = None,
    step: float = 0.0,
    wait: float = 0.0,
    most_attempts: int | None = None,
) -> Failure:
    now = datetime.now(UTC)
    first, attempts = history.first_failed_at or now, history.attempts + 1
    return Failure(
        attempts=attempts,
        first_failed_at=first,
        failed_at=now,
        exception=name_of(error),
        words=first_line(error),
        reason=reason,
        step=step,
        wait=wait,
        most_attempts=most_attempts,
    )


def poisoned(unended: int, history: History) -> Failure:
    """Return the failure of a message for which `unended` attempts did not end: processes may have died of it."""
    return unfit(Reason.POISONED, f"{unended} tries did not end", history)


def unfit(reason: Reason, words: str, history: History) -> Failure:
    """Return the failure of a message that is not tried at all."""
    now = datetime.now(UTC)
    return Failure(
        attempts=history.attempts,
        first_failed_at=history.first_failed_at or now,
        failed_at=now,
        exception="",
        words=_writable(words),
        reason=reason,
    )


def name_of(error: BaseException) -> str:
    """Return the class name of the error, or of the driver's error in it, with the module unless it is a builtin."""
    kind = type(cause_of(error))
    return _writable(kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened. The lines after it may show values of rows (PostgreSQL).

    For an error of SQLAlchemy it is the line of the driver's error: SQLAlchemy may put words about a flush before it.
    """
    try:
        words = str(cause_of(error))
    except Exception as broken:  # an exception in `__str__` of the application's class would end the worker
        words = f"its message cannot be read: {type(broken).__name__}"
    return _writable(scrub(next(iter(words.splitlines()), "")))


def _writable(words: str) -> str:
    """Return the beginning, escaped: PostgreSQL's texts hold no NUL, and UTF-8 has no half of a surrogate pair."""
    shown = words[:LONGEST_WORDS].replace("\0", r"\x00")
    return shown.encode(errors="backslashreplace").decode()[:LONGEST_WORDS]


def log_failure(delivery: Delivery, failure: Failure, error: BaseException) -> None:
    message = delivery.message
    log.warning(
        "message.failed",
        message_id=str(message.message_id),
        type=message.type,
        key=delivery.key,
        attempts=failure.attempts,
        retry_in_s=round(failure.wait, 3) if failure.reason is None else None,
        error=failure.error,
        summary=printable(f"{message.type} {delivery.key}: {failure.error} ({failure.outlook})"),
        exc_info=exc_info_of(error) if failure.attempts == 1 else None,
    )


def exc_info_of(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType] | None:
    """Return an error as a log takes it, from the application's first frame on; None if it has no such frame.

    A stand-in replaces the error. It has the same class name and only the first line of the message: the other lines
    and the causes may show values of rows.
    """
    trace, own = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == CALLS:
            own = trace.tb_next
        trace = trace.tb_next
    if own is None:
        return None
    kind = type(cause_of(error))
    shown = type(kind.__name__, (Exception,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return shown, shown(first_line(error)), own
