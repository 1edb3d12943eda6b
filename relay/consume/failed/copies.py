"""Copy messages to a retry queue or to the dead letters; the original is acknowledged once the broker has the copy.

When the process dies in between, the broker still has the original and delivers it again. So there may be two copies:
the inbox lets only one have an effect.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from aiormq.abc import DeliveredMessage

from relay.consume.classify import Failure, Reason
from relay.consume.counters import Counters
from relay.consume.failed.copy_publisher import CopyPublisher, CopyRefusedError
from relay.consume.failed.envelope import dead_letter, retry_copy
from relay.consume.failed.poison import BegunAttempts
from relay.consume.failed.queues import retry_queue_name
from relay.consume.message import Delivery
from relay.logger import get_logger
from relay.observe.printable import printable
from relay.runtime.backoff import Backoff, wait_for_event

log = get_logger("relay.consume")

Settle = Callable[[Iterable[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelContext:
    """The parts that everything on one channel shares."""

    counters: Counters
    backoff: Backoff
    begun_attempts: BegunAttempts
    settle: Settle
    stopping: asyncio.Event


class Offer(Enum):
    """The result of offering a copy to the broker."""

    TAKEN = auto()
    REFUSED = auto()  # or not confirmed: then the broker may have it


class Aside(Protocol):
    """Takes over messages that cannot be applied now, and acknowledges each when it is safe elsewhere."""

    async def put(self, delivery: Delivery, failure: Failure) -> None:
        """Take over a message that has failed."""

    async def put_behind(self, deliveries: Sequence[Delivery]) -> None:
        """Take over messages that are not admitted, because their key is held."""


@dataclass(slots=True, kw_only=True)
class Copies:
    """Sends copies of messages, each in a separate task: a queue that refuses delays only its own copies.

    It is the `Aside` of order="skip": the later messages of a key pass one that waits for its retry.
    """

    context: ChannelContext
    outgoing: CopyPublisher
    queue: str
    dead_queue: str
    consumer_name: str
    tasks: asyncio.TaskGroup
    under_way: set[asyncio.Task[None]] = field(default_factory=set)

    async def put(self, delivery: Delivery, failure: Failure) -> None:
        self.carry(delivery.delivered, failure, poisoned=delivery if failure.reason is Reason.POISONED else None)

    async def put_behind(self, deliveries: Sequence[Delivery]) -> None:
        raise AssertionError(f"nothing is held, and these are not admitted: {deliveries}")

    def carry(self, delivered: DeliveredMessage, failure: Failure, *, poisoned: Delivery | None = None) -> None:
        """Start a task that sends the copy, and then acknowledges the original."""
        if self.context.stopping.is_set():
            return
        task = self.tasks.create_task(self._carry(delivered, failure, poisoned), name="consume.copy")
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def offer(self, delivered: DeliveredMessage, failure: Failure) -> Offer:
        """Offer the copy once. The log says why the broker did not take it."""
        if failure.reason is None:
            name = retry_queue_name(self.queue, failure.step)
            properties = retry_copy(delivered, failure)
        else:
            name = self.dead_queue
            properties = dead_letter(delivered, failure, self.consumer_name)
        try:
            await self.outgoing.publish(name, properties, delivered.body)
        except CopyRefusedError as error:
            log.warning("copy.refused", queue=name, message_id=properties.message_id, error=str(error))
            return Offer.REFUSED
        if failure.reason is None:
            self.context.counters.retried[failure.step] += 1
            return Offer.TAKEN
        self.context.counters.dead_letters[failure.reason.value] += 1
        log.error(
            "message.dead",
            message_id=properties.message_id,
            type=properties.message_type,
            queue=name,
            reason=failure.reason.value,
            attempts=failure.attempts,
            error=failure.error,
            summary=printable(
                f"{properties.message_type or 'message'} {properties.message_id}: {failure.error}"
                f" ({failure.reason.value}: now in {name})"
            ),
        )
        return Offer.TAKEN

    async def _carry(self, delivered: DeliveredMessage, failure: Failure, poisoned: Delivery | None) -> None:
        refusals = 0
        while not self.context.stopping.is_set():
            if await self.offer(delivered, failure) is Offer.TAKEN:
                if poisoned is not None:
                    await self.context.begun_attempts.forget(poisoned.message.identity, self.context.stopping)
                self.context.settle([delivered.delivery_tag or 0])
                return
            refusals += 1
            await wait_for_event(self.context.stopping, self.context.backoff.seconds(refusals))
