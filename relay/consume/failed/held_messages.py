"""Hold the keys of failed messages (order = "hold"), and try the first message of each key when it is due."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from time import monotonic

from relay.consume.apply.transactions import Attempt
from relay.consume.classify import Failure, FailureReason, Judge, log_failure, poisoned
from relay.consume.failed.copies import ChannelContext, Copies, Offer
from relay.consume.failed.held_table import Head, HeldTable, NoHead
from relay.consume.failed.poison import SUSPECT_FROM
from relay.consume.hindrances import Overloaded, OverloadGate
from relay.consume.message import Delivery
from relay.errors import DatabaseUnavailableError
from relay.runtime.backoff import Stopping, wait_for_event

TAKEN_INTERVAL = 0.1  # seconds between two looks while another process works on the message that is due
LEFT_BEHIND_LOOK = 5.0  # seconds between two looks for messages that another process has left behind


class HeldWork(Enum):
    """Whether a head was due; if so, it was worked on."""

    DONE = auto()
    NONE_DUE = auto()


class FailedAgain(Enum):
    """The result for a held message that failed again."""

    BURIED = auto()  # it is a dead letter, and the next message of its key is due
    WAITING = auto()  # it stays in the table, and is tried, or made a dead letter, later


@dataclass(slots=True, kw_only=True)
class HeldMessages:
    """The `copies.Aside` of order="hold": a message is safe in the table. `run` tries the heads, one at a time."""

    context: ChannelContext
    table: HeldTable
    attempt: Attempt
    gate: OverloadGate
    judge: Judge
    copies: Copies
    unfit_for: Callable[[Delivery], Failure | None]  # a failure if no handler takes the message
    poison_limit: int
    _wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _claimed: Head | None = field(init=False, default=None)
    _must_be_alone: bool = field(init=False, default=False)

    async def put(self, delivery: Delivery, failure: Failure) -> None:
        await self.table.put(delivery, failure, self.context.stopping)
        self._is_held([delivery])
        self._count(failure)
        if failure.reason is FailureReason.POISONED:
            await self.context.begun_attempts.forget(delivery.message.identity, self.context.stopping)

    async def put_behind(self, deliveries: Sequence[Delivery]) -> None:
        await self.table.put_behind(deliveries, self.context.stopping)
        self._is_held(deliveries)

    async def run(self) -> None:
        """Try the heads that are due, until the consumer stops."""
        look_at = 0.0
        outage = self.attempt.outages.begin()
        try:
            while not self.context.stopping.is_set():
                try:
                    if (now := monotonic()) >= look_at:
                        self.context.counters.held = await self.table.look_around()
                        look_at = now + LEFT_BEHIND_LOOK
                    self._wake.clear()
                    is_idle = await self._work_on_one() is HeldWork.NONE_DUE
                    pause = min(await self._due_in(), look_at - monotonic()) if is_idle else 0.0
                    outage.end()  # before the pause, or the consumer would report a lost database for seconds more
                    if is_idle:
                        await wait_for_event(self._wake, pause)
                except DatabaseUnavailableError as error:
                    await outage.wait(error, self.context.stopping)
        except Stopping:
            pass  # the claimed head stays claimed until `let_go`
        finally:
            outage.leave()
            await self.attempt.close()

    def stop(self) -> None:
        self._wake.set()

    async def let_go(self) -> None:
        """Release the claimed head: this consumer has ended its attempt."""
        if self._claimed is not None:
            with suppress(DatabaseUnavailableError):  # then the attempt counts as one that did not end
                await self.table.release(self._claimed)
            self._claimed = None

    async def _due_in(self) -> float:
        due_in = await self.table.next_due()
        if due_in is None:
            return LEFT_BEHIND_LOOK
        return due_in if due_in > 0 else TAKEN_INTERVAL

    def _is_held(self, deliveries: Sequence[Delivery]) -> None:
        self.context.settle(delivery.tag for delivery in deliveries)
        self.context.counters.held += len(deliveries)
        self._wake.set()

    def _count(self, failure: Failure) -> None:
        if failure.reason is None:
            self.context.counters.retried[failure.step] += 1

    async def _work_on_one(self) -> HeldWork:
        """Claim the first head that is due, and try it. Raises Stopping."""
        async with self.gate.enter(self.context.stopping, alone=self._must_be_alone) as entry:
            head = await self.table.claim()
            if isinstance(head, NoHead):
                return HeldWork.NONE_DUE if head is NoHead.NONE_DUE else HeldWork.DONE
            self._claimed = head
            failure = self._verdict(head)
            if failure is None and head.unended >= SUSPECT_FROM and not self._must_be_alone:
                self._must_be_alone = True
                await self.let_go()
                return HeldWork.DONE
            if failure is None:
                await self._connect()
                try:
                    applied = await self.attempt.apply([head.delivery], entry)
                except Stopping:
                    raise
                except Exception as error:  # a handler may raise anything
                    failure = self.judge.failure(error, head.history)
                    self.context.counters.failed += 1
                    log_failure(head.delivery, failure, error)
                else:
                    if isinstance(applied, Overloaded):
                        await self.let_go()
                        return HeldWork.DONE
        self._must_be_alone = False
        if failure is None or await self._put_off_or_bury(head, failure) is FailedAgain.BURIED:
            self.context.counters.held -= 1
            await self.table.promote(head)
        self._claimed = None
        return HeldWork.DONE

    async def _connect(self) -> None:
        """Connect for a try. If that fails, release the claim: else it would expire and count as a death."""
        try:
            await self.attempt.connect()
        except DatabaseUnavailableError:
            await self.let_go()
            raise

    def _verdict(self, head: Head) -> Failure | None:
        """Return the failure for which the head is not tried; None: it is tried."""
        if head.dead is None and head.unended >= self.poison_limit:
            return poisoned(head.unended, head.history)
        return head.dead or self.unfit_for(head.delivery)

    async def _put_off_or_bury(self, head: Head, failure: Failure) -> FailedAgain:
        """Put the head off until its next attempt, or make it a dead letter after its last."""
        if failure.reason is None:
            await self.table.postpone(head, failure, failure.wait)
            self._count(failure)
            return FailedAgain.WAITING
        if await self.copies.offer(head.delivery.delivered, failure) is Offer.REFUSED:
            await self.table.postpone(head, failure, self.context.backoff.maximum)
            return FailedAgain.WAITING
        if await self.table.delete_unchanged(head):
            return FailedAgain.BURIED
        await self.table.release(head)
        return FailedAgain.WAITING
