"""Several relays under load, as processes: their lanes, and what must hold at the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.chaos.fleet import WITNESS, Fleet, FleetServers, running_fleet
from tests.faults.billing import WRITTEN
from tests.faults.checker import SENDING, Checker, Invariant, assert_valid
from tests.faults.history import Owned, Published
from tests.faults.owners import SLACK
from tests.support.eventually import eventually

LANES = 16
STEP = 150  # messages by which relays come on
# Peers notice a silent node soon, and a node its silent broker, so that a drill takes seconds.
QUICK = {
    "RELAY_NODE_TIMEOUT": "2",
    "RELAY_HEARTBEAT_INTERVAL": "0.2",
    "RELAY_BROKER_HEARTBEAT": "2",
}
ALL = (*SENDING, Invariant.ONE_OWNER)


class FleetDrill:
    """A fleet of relays under load.

    Attributes:
        repeats: messages that came more than once, counted by `finish`.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        assert self.fleet.overtaken() == []
        self.repeats = 0

    def lanes(self, relay: str) -> int:
        """Return how many lanes this relay had at the last look."""
        last = next((one for one in reversed(self.fleet.history) if isinstance(one, Owned)), None)
        return sum(owner == relay for owner in last.lanes.values()) if last else 0

    def are_shared(self) -> bool:
        """Whether the running relays share all lanes evenly."""
        running = [relay for relay in self.fleet.relays.values() if relay.victim.is_running()]
        shares = [self.lanes(relay.name) for relay in running]
        return sum(shares) == LANES and max(shares) - min(shares) <= 1

    async def come_on(self) -> None:
        goal = self._published() + STEP
        await eventually(lambda: self._published() >= goal, "the relays go on", 30)

    async def take_over(self, relay: str, what: str) -> None:
        """Wait until this relay has all lanes, and delivers."""
        await eventually(lambda: self.lanes(relay) == LANES, f"{what}, and {relay} takes all lanes", 30)
        await self.come_on()

    async def share_again(self) -> None:
        await eventually(self.are_shared, "the lanes are shared evenly", 30)
        await self.come_on()

    async def finish(self, stop: asyncio.Event) -> None:
        """Stop writing, and check: nothing lost, reordered, or sent without the lane."""
        stop.set()
        await asyncio.sleep(SLACK)
        servers = self.fleet.servers
        checker = Checker(self.fleet.history, servers.database_url, servers.broker_url, [WITNESS], business=WRITTEN)
        assert_valid(await checker.ask(within=30, at_rest=True), *ALL)
        self.repeats = len(checker.deliveries) - len({one.message_id for one in checker.deliveries})

    def _published(self) -> int:
        return sum(isinstance(record, Published) for record in self.fleet.history)


@asynccontextmanager
async def drill(servers: FleetServers, logs: Path, *names: str, **variables: str) -> AsyncIterator[FleetDrill]:
    """Yield a fleet of these relays under load; at the end the checker judges everything.

    `variables`: added to the relays' environment.
    """
    async with running_fleet(servers, 7, logs, names=names, **{**QUICK, **variables}) as fleet:
        running = FleetDrill(fleet)
        await eventually(running.are_shared, "the lanes are shared evenly", 30)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.writers.run(stop), name="writers")
            await running.come_on()
            yield running
            await running.finish(stop)
