"""A member that is cancelled, at whatever moment, leaves nothing open, and the next one goes on."""

import random

import pytest

from relay.config.settings import BrokerSettings
from relay.consume import Inbox
from relay.consume.pool import PartitionedConsumer, PoolPolicy
from tests.consume.cancelled import run_once
from tests.consume.effects import QUEUE, Table, count, running
from tests.consume.pool.partitions import Partitions
from tests.support.cancels import Run, cancel_at, moments_of
from tests.support.eventually import eventually

KEYS = 3
EACH = 24  # of so many moments, the quick test cancels at one


class Trials:
    """Members that work on a few messages each until they are stopped, or cancelled before."""

    def __init__(self, partitions: Partitions, table: Table, inbox: Inbox, broker: BrokerSettings) -> None:
        self._partitions = partitions
        self._table = table
        self._inbox = inbox
        self._broker = broker
        self._sent = 0

    async def run(self, run: Run) -> None:
        """Run a member once, and see that nothing of it is left open."""
        await self._partitions.send(range(self._sent, self._sent + KEYS), keys=KEYS)
        self._sent += KEYS
        await run_once(run, self._member(), applies=KEYS)

    async def see(self) -> None:
        """See that each message is applied once, in order per key."""
        async with running(self._member()):
            await eventually(self._has_applied_all, "all is applied", within=300)
        for key in range(KEYS):
            assert await self._table.numbers(f"key-{key}") == [*range(key, self._sent, KEYS)]

    def _member(self) -> PartitionedConsumer:
        policy = PoolPolicy(on_assigned=lambda _: None)
        return PartitionedConsumer(QUEUE, [count], inbox=self._inbox, broker=self._broker, pool=policy)

    async def _has_applied_all(self) -> bool:
        return await self._table.inbox_count() >= self._sent


@pytest.fixture
def trials(partitions: Partitions, table: Table, inbox: Inbox, broker: BrokerSettings) -> Trials:
    return Trials(partitions, table, inbox, broker)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("master")
async def test_a_member_that_is_cancelled_leaves_nothing_open(trials: Trials) -> None:
    moments = await moments_of(trials.run)

    await cancel_at(moments[random.randrange(EACH) :: EACH], trials.run)

    await trials.see()


@pytest.mark.drills
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("master")
@pytest.mark.parametrize("again", [0, 2])
async def test_a_member_is_cancelled_at_every_moment(again: int, trials: Trials) -> None:
    """Fault: the task is cancelled at each wait, wake and end of its tasks, and again at a wait of its closing.

    No socket and no task is left. The next member applies each message once, in order per key.
    """
    await cancel_at(await moments_of(trials.run), trials.run, again=again)

    await trials.see()
