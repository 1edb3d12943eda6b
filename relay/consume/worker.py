"""Apply messages, and the messages of a key in the order of delivery.

A free worker takes the key that has waited longest, and no two workers have messages of one key. A hash of the key does
not choose the worker. With as many deliveries as workers, some would always meet in one worker while others idle
(`docs/decisions/0017-keys-to-the-first-free-worker.md`).

A message that fails goes aside (`copies.Aside`): into a retry queue, or into the table of held messages. It is
acknowledged once it is safe there, so a message that waits for its next attempt takes no place of the prefetch. The
consumer does not return it to the broker between two attempts: the later messages of its key would overtake it. And
RabbitMQ 4 drops a message from a quorum queue when it came back 20 times.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from uuid import UUID

from relay.consume.apply.inbox import Applied, Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.apply.transactions import Attempt
from relay.consume.classify import Judge, log_failure, poisoned
from relay.consume.failed.copies import Aside, ChannelContext
from relay.consume.failed.envelope import history_of
from relay.consume.failed.poison import SUSPECT_FROM
from relay.consume.hindrances import OverloadGate
from relay.consume.message import Delivery
from relay.runtime.backoff import Stopping, raise_if_set


class End(Enum):
    """The mark that a stopped queue puts behind its last key."""

    STOPPED = auto()


class KeyQueue:
    """Deliveries that wait for a worker, in the order in which they came, by key."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Delivery]] = {}  # by key, also of keys that a worker has
        self._free: asyncio.Queue[str | End] = asyncio.Queue()  # keys with deliveries that no worker has
        self._is_stopped = False

    def put(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(delivery.key)
        if waiting is None:
            self._waiting[delivery.key] = deque([delivery])
            self._free.put_nowait(delivery.key)
        else:
            waiting.append(delivery)

    async def take(self, most: int) -> list[Delivery]:
        """Wait for deliveries, and take at most `most` of them, in the order in which they came.

        No other worker gets one of their keys before they are passed to `done`.

        Raises:
            Stopping: `stop` was called.
        """
        batch: list[Delivery] = []
        key = await self._free.get()
        while key is not End.STOPPED:
            waiting = self._waiting[key]
            while waiting and len(batch) < most:
                batch.append(waiting.popleft())
            if len(batch) == most or self._free.empty():
                break
            key = self._free.get_nowait()
        if self._is_stopped:
            self._free.put_nowait(End.STOPPED)  # wakes the next worker
            raise Stopping
        if len(batch) > 1:
            batch.sort(key=lambda delivery: delivery.tag)
        return batch

    def give_back(self, batch: Sequence[Delivery]) -> None:
        """Put taken deliveries back to the front of their keys, in their order. The caller must still call `done`."""
        for delivery in reversed(batch):
            self._waiting[delivery.key].appendleft(delivery)

    def done(self, batch: Iterable[Delivery]) -> None:
        """Release the keys of a batch to other workers."""
        for key in {delivery.key for delivery in batch}:
            if self._waiting[key]:
                self._free.put_nowait(key)
            else:
                del self._waiting[key]

    def stop(self) -> None:
        """Let every `take` raise Stopping."""
        self._is_stopped = True
        self._free.put_nowait(End.STOPPED)


LOOKED_UP_AT_ONCE = 500  # deliveries

# A subquery, because a join may read the whole inbox (tests/consume/test_plans.py).
KNOWN = """
    SELECT message_id
    FROM unnest(%(message_ids)s::uuid[], %(days)s::date[]) AS came (message_id, message_day)
    WHERE (
        SELECT true FROM {schema}.processed_message AS known
        WHERE known.consumer_name = %(consumer)s AND known.message_id = came.message_id
            AND known.message_day = came.message_day
        LIMIT 1
    )
"""


class Repeats:
    """Which deliveries of one channel are repeats.

    A replay sends thousands in a row, and a transaction for each would be wasted. A message that the inbox knows has no
    effect, so the consumer may acknowledge it in any order. Only new messages keep their places in their keys.

    Attributes:
        expected: the last batch was known, so this may be a replay.
        turn: a worker holds it during a lookup, so that the next lookup takes all deliveries that came meanwhile.
    """

    def __init__(self, inbox: Inbox, session: InboxSession) -> None:
        self.expected = False
        self.turn = asyncio.Lock()
        self._consumer = inbox.consumer_name
        self._session = session
        self._known = inbox.statement(KNOWN)

    async def known(self, deliveries: Sequence[Delivery], stopping: asyncio.Event) -> set[UUID]:
        """Return the ids of the deliveries that were applied and committed before. Raises Stopping."""
        parameters = {
            "consumer": self._consumer,
            "message_ids": [delivery.message.identity for delivery in deliveries],
            "days": [delivery.message.day for delivery in deliveries],
        }
        rows = await self._session.insist(stopping, self._known, parameters)
        return {message_id for (message_id,) in rows}


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """Applies one transaction at a time, of at most `batch_size` messages."""

    context: ChannelContext
    key_queue: KeyQueue
    attempt: Attempt
    gate: OverloadGate
    judge: Judge
    aside: Aside
    batch_size: int
    poison_limit: int
    repeats: Repeats

    async def run(self) -> None:
        """Work until the consumer stops.

        On a stop, the running transaction is finished; messages that were not begun stay unacknowledged and come again.
        A cancellation rolls the running transaction back.
        """
        try:
            while True:
                if self.repeats.expected:
                    await self._absorb()
                else:
                    batch = await self.key_queue.take(self.batch_size)
                    await self._work(batch)
                    self.key_queue.done(batch)
        except Stopping:
            pass
        finally:
            await self.attempt.close()

    async def _work(self, batch: Sequence[Delivery]) -> None:
        again = {delivery.message.identity for delivery in batch if delivery.message.redelivered}
        unended = await self.context.begun_attempts.unended(again, self.context.stopping) if again else {}
        most = max((unended[message_id] for message_id in again), default=0)
        if most < SUSPECT_FROM:
            await self._apply(batch, unended, alone=False)
        elif len(batch) > 1:
            await self._work_one_by_one(batch)
        elif most < self.poison_limit:
            await self._apply(batch, unended, alone=True)
        else:
            failure = poisoned(most, history_of(batch[0].delivered))
            await self.aside.put(batch[0], failure)

    async def _absorb(self) -> None:
        """Acknowledge the repeats among the waiting deliveries. The rest goes back to its place, and is worked on."""
        async with self.repeats.turn:
            if not self.repeats.expected:
                return
            batch = await self.key_queue.take(LOOKED_UP_AT_ONCE)
            known = await self.repeats.known(batch, self.context.stopping)
            # A redelivered repeat is worked on, too: `BegunAttempts` must forget it.
            rest = [each for each in batch if each.message.redelivered or each.message.identity not in known]
            self.repeats.expected = not rest
            self.key_queue.give_back(rest)
            self.key_queue.done(batch)
        left = {each.tag for each in rest}
        self.context.counters.duplicates += len(batch) - len(rest)
        self.context.settle(each.tag for each in batch if each.tag not in left)

    async def _work_one_by_one(self, batch: Sequence[Delivery]) -> None:
        for delivery in batch:
            raise_if_set(self.context.stopping)
            await self._work([delivery])

    async def _apply(self, batch: Sequence[Delivery], unended: dict[UUID, int], *, alone: bool) -> None:
        try:
            applied = await self._try(batch, unended, alone=alone)
        except Stopping:
            raise
        except Exception as error:  # a handler may raise anything, and this task must go on with the others
            if len(batch) > 1:
                # One message has caused the roll-back of the batch: each is applied alone to find it.
                await self._work_one_by_one(batch)
            else:
                await self._fail(batch[0], error)
            return
        self.repeats.expected = not applied.count and not applied.left
        await self.context.begun_attempts.end(unended)
        left = [delivery for delivery in batch if delivery.message.identity in applied.left]
        self.context.settle(delivery.tag for delivery in batch if delivery.message.identity not in applied.left)
        if left:
            await self.aside.put_behind(left)

    async def _try(self, batch: Sequence[Delivery], unended: dict[UUID, int], *, alone: bool) -> Applied:
        """Apply a batch; after an overload, try again until it succeeds. Raises Stopping: nothing was applied."""
        while True:
            async with self.gate.enter(self.context.stopping, alone=alone) as entry:
                await self.context.begun_attempts.begin(unended, self.context.stopping)
                if isinstance(applied := await self.attempt.apply(batch, entry), Applied):
                    return applied

    async def _fail(self, delivery: Delivery, error: Exception) -> None:
        failure = self.judge.failure(error, history_of(delivery.delivered))
        self.context.counters.failed += 1
        log_failure(delivery, failure, error)
        await self.context.begun_attempts.end([delivery.message.identity])
        await self.aside.put(delivery, failure)
