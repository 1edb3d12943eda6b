"""What a consumer does with failures, and how much it works on at once: the settings that an application gives it."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from relay.errors import ConfigurationError
from relay.runtime.backoff import Backoff, longest_wait

MAX_PREFETCH = 65535  # AMQP has 16 bits for it
Order = Literal["hold", "skip"]  # what a message that failed means for the later ones of its key
CONCURRENCY = 4  # of a consumer, unless the application gives a value
LEAST_POISON_LIMIT = 3  # a message is poisoned only after a process has died that tried it alone


class FailureClass(StrEnum):
    """The class of a failure."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    OVERLOAD = "overload"
    UNCLASSIFIED = "unclassified"


@dataclass(frozen=True, slots=True)
class Retries:
    """The attempts at a message and the waits between them.

    Args:
        attempts: attempts in all, the first one included; after the last the message is a dead letter.
        initial: seconds before the second attempt, at most; each wait is `multiplier` times as long as the one before.
        maximum: the longest wait, in seconds.
        jitter: the part of a wait that chance may take away, so that many messages do not come at once.
    Raises:
        ConfigurationError: a value is out of range.
    """

    attempts: int = 5
    initial: float = 1.0
    multiplier: float = 2.0
    maximum: float = 300.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 < self.initial <= self.maximum or self.multiplier < 1 or not 0 <= self.jitter < 1:
            raise ConfigurationError(
                f"{self}: attempts and multiplier are at least 1, initial is above 0 and at most maximum,"
                " jitter is at least 0 and below 1"
            )

    def step(self, attempts: int) -> float:
        """Return the longest wait after the `attempts`-th failed attempt, in seconds."""
        return longest_wait(attempts, self.initial, self.maximum, multiplier=self.multiplier)

    def steps(self) -> list[float]:
        """Return the longest wait after each attempt except the last, in seconds."""
        return [self.step(attempts) for attempts in range(1, self.attempts)]

    def wait(self, attempts: int) -> float:
        """Return the seconds to wait after the `attempts`-th failed attempt."""
        return self.step(attempts) * (1.0 - self.jitter * random.random())  # noqa: S311  (nothing to do with secrets)


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What happens to a message that failed, and to the later messages of its key.

    Args:
        order: "hold": the message waits in the table `held_message` for its next attempt, and the later messages of its
            key wait behind it. "skip": it waits in a retry queue, and the later messages pass it.
        retries: when and how often a message is tried again. After the last attempt it goes to the queue's dead
            letters.
        transient_retries: the same for `Transient` and the classes in `retry_on`; None: as `retries`.
        retry_on, permanent_on, overload_on: classes of exceptions that mean `Transient`, `Permanent` and `Overload`.
            The nearest class of an exception decides.
        poison_limit: when this many processes have died while they worked on a message, it is a dead letter.
    Raises:
        ConfigurationError: `order` is another word, a class has two meanings, or `poison_limit` is too low.
    """

    order: Order = "hold"
    retries: Retries = Retries()
    transient_retries: Retries | None = None
    retry_on: Collection[type[Exception]] = ()
    permanent_on: Collection[type[Exception]] = ()
    overload_on: Collection[type[Exception]] = ()
    poison_limit: int = 5

    def __post_init__(self) -> None:
        if self.poison_limit < LEAST_POISON_LIMIT:
            raise ConfigurationError(f"poison_limit ({self.poison_limit}) is at least {LEAST_POISON_LIMIT}")
        if self.order not in get_args(Order):
            raise ConfigurationError(f"order is {' or '.join(map(repr, get_args(Order)))}, not {self.order!r}")
        for name in ("retry_on", "permanent_on", "overload_on"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # it is frozen; an iterator is read once
        self.classes()  # raises

    @property
    def holds_keys(self) -> bool:
        """Whether the later messages of its key wait behind a message that failed."""
        return self.order == "hold"

    def classes(self) -> dict[type[BaseException], FailureClass]:
        """Return the failure class of each exception class that the policy names."""
        named: dict[type[BaseException], FailureClass] = {}
        for classes, fault in (
            (self.retry_on, FailureClass.TRANSIENT),
            (self.permanent_on, FailureClass.PERMANENT),
            (self.overload_on, FailureClass.OVERLOAD),
        ):
            for each in classes:
                if named.setdefault(each, fault) is not fault:
                    raise ConfigurationError(f"{each.__qualname__} cannot be {named[each]} and {fault}: name it once")
        return named


@dataclass(frozen=True, slots=True)
class WorkPolicy:
    """How much a consumer works on at once, and how long it waits.

    Args:
        concurrency: concurrent transactions, each on a separate database connection. Messages of one key (aggregate
            type and id) are never in two of them, and stay in order. None: 4. In a pool: 1 for each partition, and no
            other value is allowed.
        batch_size: messages in one transaction, at most. When one of them fails, the batch is rolled back and its
            messages are applied again one by one. So a handler's effects outside the database may happen twice.
        pipeline: send the handlers' statements without waiting for each answer (psycopg's pipeline mode). An error
            then shows at a later statement or at the end, and `rowcount` is unknown before a fetch.
        stall_after: seconds; when messages are in flight and no message settles for so long, the consumer is not ready.
        drain_timeout: seconds that running transactions get when the consumer is stopped.
        backoff: the waits while the database or broker is lost, while a queue refuses a copy, and between the probes of
            an overload.
    Raises:
        ConfigurationError: `concurrency` or `batch_size` is out of range.
    """

    concurrency: int | None = None
    batch_size: int = 1
    pipeline: bool = False
    stall_after: float = 5.0
    drain_timeout: float = 8.0
    backoff: Backoff = Backoff()  # noqa: RUF009 (immutable)

    def __post_init__(self) -> None:
        concurrency = self.workers
        if concurrency < 1 or self.batch_size < 1 or concurrency * self.batch_size > MAX_PREFETCH:
            raise ConfigurationError(
                f"concurrency ({concurrency}) and batch_size ({self.batch_size}) are at least 1,"
                f" and their product at most {MAX_PREFETCH}"
            )

    @property
    def workers(self) -> int:
        """Return the number of workers of a consumer that is no member of a pool."""
        return CONCURRENCY if self.concurrency is None else self.concurrency
