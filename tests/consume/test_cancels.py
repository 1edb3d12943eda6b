"""A consumer that is cancelled, at whatever moment, leaves nothing open and loses nothing."""

import random
from collections import defaultdict
from typing import Any

import pytest

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, WorkPolicy, on
from tests.consume.cancelled import run_once
from tests.consume.effects import CONSUMER, Queue, Table, count, running
from tests.consume.sqlalchemy_handlers import HANDLERS, KINDS
from tests.support.cancels import Run, cancel_at, moments_of
from tests.support.eventually import eventually

WORK = WorkPolicy(concurrency=2)
EACH = 8  # of so many moments, the quick test cancels at one


@on("Counted")
def count_in_thread(message: Message, connection: Any) -> None:
    connection.execute(
        "INSERT INTO effect (message_id, key, number) VALUES (%s, %s, %s)",
        (message.message_id, message.aggregate_id, message.json()),
    )


class Trials:
    """Consumers that work on a few messages each until they are stopped, or cancelled before."""

    def __init__(
        self,
        queue: Queue,
        table: Table,
        inbox: Inbox,
        broker: BrokerSettings,
        handler: Any,
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008  (immutable)
    ) -> None:
        self._failures = failures
        self._queue = queue
        self._table = table
        self._inbox = inbox
        self._broker = broker
        self._handler = handler
        self._sent: dict[str, list[int]] = defaultdict(list)

    async def run(self, run: Run) -> None:
        """Run a consumer once, and see that nothing of it is left open."""
        for key in "aab":
            self._sent[key].append(len(self._sent[key]))
            await self._queue.send(self._sent[key][-1], key=key)
        await run_once(run, self._consumer(), applies=3)

    async def see(self) -> None:
        """See that each message is applied once, in order per key."""
        consumer = self._consumer()
        async with running(consumer):
            applied = sum(map(len, self._sent.values()))
            await eventually(lambda: self._has_applied(applied), "all is applied", within=300)
        for key, numbers in self._sent.items():
            assert await self._table.numbers(key) == numbers
        assert await self._queue.dead_count() == 0

    def _consumer(self) -> Consumer:
        return Consumer(
            self._queue.name,
            [self._handler],
            inbox=self._inbox,
            broker=self._broker,
            work=WORK,
            failures=self._failures,
        )

    async def _has_applied(self, most: int) -> bool:
        return await self._table.inbox_count() >= most


@pytest.mark.timeout(600)
async def test_a_consumer_that_is_cancelled_leaves_nothing_open_and_loses_nothing(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    trials = Trials(queue, table, inbox, broker, count)
    moments = await moments_of(trials.run)

    await cancel_at(moments[random.randrange(EACH) :: EACH], trials.run)

    await trials.see()


@pytest.mark.drills
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "again"),
    [*(("async", again) for again in range(4)), ("thread", 0), ("thread", 2), *((kind, 0) for kind in KINDS)],
)
async def test_a_consumer_of_each_kind_is_cancelled_at_every_moment(
    kind: str,
    again: int,
    queue: Queue,
    table: Table,
    targets: dict[str, Any],
    inbox: Inbox,
    broker: BrokerSettings,
) -> None:
    """Fault: the task is cancelled at each wait, wake and end of its tasks, and again at a wait of its closing.

    No socket and no task is left. Each message is applied once, in order per key. No message becomes a dead letter.
    """
    handler = {"async": count, "thread": count_in_thread, **HANDLERS}[kind]
    used = Inbox(targets[kind], CONSUMER) if kind in KINDS else inbox
    # A cancel while it closes counts as a death of the process: nothing can take back then that a try has begun.
    trials = Trials(queue, table, used, broker, handler, FailurePolicy(poison_limit=10_000 if again else 5))

    await cancel_at(await moments_of(trials.run), trials.run, again=again)

    await trials.see()
