"""Several relays on one table: one is frozen, cut off on either side, or all are restarted one after the other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM

import pytest

from tests.chaos.stand import WITNESS, Servers, Stand, standing
from tests.faults.billing import WRITTEN
from tests.faults.checker import SENDING, Checker, Invariant, assert_valid
from tests.faults.history import Healed, History, Injected, Owned, Published, Reach
from tests.faults.owners import SLACK, belated
from tests.support.eventually import eventually
from tests.support.postgres import PostgresServer
from tests.support.proxy import FaultProxy, Way
from tests.support.rabbitmq import RabbitServer

LANES = 16
LONGEST_GAP = 2.0  # seconds without a frame, while a relay is restarted
STEP = 150  # messages by which relays come on
# Peers notice a silent node soon, and a node its silent broker, so that a drill takes seconds.
QUICK = {
    "RELAY_RELAY__NODE_TIMEOUT": "2",
    "RELAY_RELAY__HEARTBEAT_INTERVAL": "0.2",
    "RELAY_BROKER__HEARTBEAT": "1",
}
ALL = (*SENDING, Invariant.ONE_OWNER)


class Drill:
    """Relays under load."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.repeats = 0

    def lanes(self, relay: str) -> int:
        """Tell how many lanes it was last seen with."""
        last = next((one for one in reversed(self.stand.history) if isinstance(one, Owned)), None)
        return sum(owner == relay for owner in last.lanes.values()) if last else 0

    def are_shared(self) -> bool:
        shares = [self.lanes(relay) for relay in self.stand.relays]
        return sum(shares) == LANES and max(shares) - min(shares) <= 1

    async def come_on(self) -> None:
        goal = self._published() + STEP
        await eventually(lambda: self._published() >= goal, "the relays go on", 30)

    async def take_over(self, relay: str, what: str) -> None:
        """Wait until all lanes are this relay's, and it goes on."""
        await eventually(lambda: self.lanes(relay) == LANES, f"{what}, and {relay} takes all lanes", 30)
        await self.come_on()

    async def share_again(self) -> None:
        await eventually(self.are_shared, "the lanes are shared evenly", 30)
        await self.come_on()

    async def finish(self, stop: asyncio.Event) -> None:
        """Stop writing, and see that nothing was lost, reordered, or sent by who had not the lane."""
        stop.set()
        await asyncio.sleep(SLACK)
        servers = self.stand.servers
        checker = Checker(self.stand.history, servers.database_url, servers.broker_url, [WITNESS], business=WRITTEN)
        assert_valid(await checker.ask(within=30, at_rest=True), *ALL)
        self.repeats = len(checker.deliveries) - len({one.message_id for one in checker.deliveries})

    def _published(self) -> int:
        return sum(isinstance(record, Published) for record in self.stand.history)


@pytest.fixture
def servers(postgres: PostgresServer, rabbitmq: RabbitServer, database_url: str, broker_url: str) -> Servers:
    return Servers(postgres, rabbitmq, database_url, broker_url)


@asynccontextmanager
async def drill(servers: Servers, logs: Path, *names: str) -> AsyncIterator[Drill]:
    """Run relays of these names under load, evenly; on leaving, everything is judged."""
    async with standing(servers, 7, logs, names=names, **QUICK) as stand:
        running = Drill(stand)
        await eventually(running.are_shared, "the lanes are shared evenly", 30)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stand.writers.run(stop), name="writers")
            await running.come_on()
            yield running
            await running.finish(stop)


async def test_a_relay_frozen_past_its_lock_wakes_without_it(servers: Servers, tmp_path: Path) -> None:
    async with drill(servers, tmp_path, "one", "two") as running:
        history, victim = running.stand.history, running.stand.relays["one"].victim
        history.append(Injected("frozen", Reach.ALL, forgets=True, relay="one"))
        victim.tell(SIGSTOP)
        await running.take_over("two", "it is frozen")
        victim.tell(SIGCONT)
        await running.share_again()
        history.append(Healed("frozen"))

    late = belated(history, "one")
    print(f"sent late: {len(late)}")
    assert len(late) <= 5


@pytest.mark.parametrize("side", ["broker", "database"])
async def test_a_relay_cut_off_on_one_side_gives_its_lanes_to_the_other(
    servers: Servers, tmp_path: Path, side: str
) -> None:
    async with drill(servers, tmp_path, "one", "two") as running:
        history, relay = running.stand.history, running.stand.relays["one"]
        proxy: FaultProxy = {"broker": relay.broker, "database": relay.database}[side]
        history.append(Injected("cut off", Reach.ALL, forgets=True, relay="one"))
        for way in Way:
            proxy.hold(way)
        await running.take_over("two", f"it is cut off from the {side}")
        proxy.cut()
        for way in Way:
            proxy.release(way)
        await running.share_again()
        history.append(Healed("cut off"))

    assert belated(history, "one") == []


@pytest.mark.drills
async def test_a_rolling_restart_sends_nothing_twice_and_stops_nothing(servers: Servers, tmp_path: Path) -> None:
    async with drill(servers, tmp_path, "one", "two", "three") as running:
        begun = len(running.stand.history)
        for name, relay in running.stand.relays.items():
            running.stand.history.append(Injected(f"roll {name}", Reach.ALL, relay=name))
            assert await asyncio.to_thread(relay.victim.stop, SIGTERM) == 0
            await relay.victim.start()
            await running.share_again()
            running.stand.history.append(Healed(f"roll {name}"))
        rolled = running.stand.history[begun:]

    assert running.repeats == 0
    gap = longest_gap(rolled, lambda _: True)
    of_a_lane = max(longest_gap(rolled, lambda sent: sent.lane == lane) for lane in range(LANES))  # noqa: B023
    print(f"longest gap {gap:.2f} s, of one lane {of_a_lane:.2f} s")
    assert gap < LONGEST_GAP


def longest_gap(history: History, chosen: Callable[[Published], bool]) -> float:
    at = [record.at for record in history if isinstance(record, Published) and chosen(record)]
    return max(later - earlier for earlier, later in pairwise(at))
