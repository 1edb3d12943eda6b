"""A publisher that is cancelled, at whatever moment, leaves nothing open and loses no event that it has accepted."""

import asyncio
import random
from collections import defaultdict
from contextlib import suppress
from itertools import count
from pathlib import Path

import orjson
import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings, RelaySettings
from relay.errors import NotAcceptedError
from relay.publisher import DurablePublisher
from tests.engine.conftest import Reader
from tests.publisher.events import is_direct, measured
from tests.support.cancels import Open, Run, cancel_at, moments_of
from tests.support.eventually import eventually

EACH = 8  # of so many moments, the quick test cancels at one


class Trials:
    """Publishers of one name, which publish a few events each unless they are cancelled before."""

    def __init__(self, place: DatabaseSettings | Path, broker: BrokerSettings, queue: Reader) -> None:
        self._place = place
        self._broker = broker
        self._queue = queue
        self._numbers = 0
        self._nodes = count()
        self._accepted: set[str] = set()

    async def run(self, run: Run) -> None:
        """Run a publisher once, and see that nothing of it is left open."""
        before = Open.now()
        with run.of(self._publish()) as task, suppress(asyncio.CancelledError):
            await task
        await before.is_all()

    async def see(self) -> None:
        """See that each event that was accepted has come, and that each key came in order."""
        async with self._publisher() as publisher:
            await publisher.publish(measured(self._numbers + 1, "end"))
            await eventually(lambda: is_direct(publisher), "the buffer is empty")
        came: dict[str, dict[int, str]] = defaultdict(dict)  # by key, in the order in which each came first
        for message in await self._queue.everything():
            number = orjson.loads(message.body)["number"]
            came[str(message.headers["x-aggregate-id"])].setdefault(number, str(message.message_id))
        assert {id_ for of_key in came.values() for id_ in of_key.values()} >= self._accepted
        assert {key: list(numbers) for key, numbers in came.items()} == {
            key: sorted(numbers) for key, numbers in came.items()
        }

    def _publisher(self) -> DurablePublisher:
        # A node would wait until one of its name, whose end was cut off, is known to be gone.
        relay = RelaySettings(node=f"publisher {next(self._nodes)}")
        return DurablePublisher(self._place, broker=self._broker, name="sensors", relay=relay, embedded=True)

    async def _publish(self) -> None:
        async with self._publisher() as publisher:
            await eventually(lambda: is_direct(publisher), "what the last one has left in the buffer is sent")
            async with asyncio.TaskGroup() as tasks:
                for key in "aa":
                    tasks.create_task(self._publish_one(publisher, key))
            last = asyncio.create_task(self._publish_one(publisher, "b"))
            await asyncio.sleep(0)  # so that it is on its way when the publisher closes
        await last

    async def _publish_one(self, publisher: DurablePublisher, key: str) -> None:
        self._numbers += 1
        event = measured(self._numbers, key)
        with suppress(NotAcceptedError):
            await publisher.publish(event)
            self._accepted.add(str(event.message_id))


@pytest.fixture
def trials(place: DatabaseSettings | Path, broker: BrokerSettings, queue: Reader) -> Trials:
    return Trials(place, broker, queue)


@pytest.mark.timeout(600)
async def test_a_publisher_that_is_cancelled_leaves_nothing_open(trials: Trials) -> None:
    moments = await moments_of(trials.run)

    await cancel_at(moments[random.randrange(EACH) :: EACH], trials.run)

    await trials.see()


@pytest.mark.drills
@pytest.mark.timeout(600)
@pytest.mark.parametrize("again", [0, 1, 2, 3])
async def test_a_publisher_is_cancelled_at_every_moment(again: int, trials: Trials) -> None:
    """Fault: the task is cancelled at each wait, wake and end of its tasks, and again at a wait of its closing.

    No socket, no file and no task is left. What was accepted arrives, in order per key.
    """
    await cancel_at(await moments_of(trials.run), trials.run, again=again)

    await trials.see()
