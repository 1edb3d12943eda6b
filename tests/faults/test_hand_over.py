"""One relay must give half of its lanes to another at the worst moments, and one of them dies meanwhile.

A lane moves only when nothing of it is in flight. So it stays while a confirm or a mark is missing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from tests.chaos.fleet import FleetServers
from tests.faults.history import Healed, Injected, Published, Reach
from tests.faults.relays import LANES, FleetDrill, drill
from tests.support.eventually import eventually
from tests.support.proxy import Way

# Nobody is to give up a broker that says nothing for as long as the drill lasts.
PATIENT = {"RELAY_BROKER_HEARTBEAT": "60", "RELAY_STALL_AFTER": "60"}
LOOKED_ON = 1.0  # seconds; five heartbeats

JOINED = "SELECT FROM outbox.node WHERE name = 'two' AND can_deliver AND heartbeat_at > now() - interval '1 s'"

pytestmark = pytest.mark.drills


@asynccontextmanager
async def unconfirmed(running: FleetDrill) -> AsyncIterator[None]:
    """Hold the confirms of the first relay until the end of the block."""
    proxy = running.fleet.relays["one"].broker
    running.fleet.history.append(Injected("confirms held", Reach.ALL, relay="one"))
    proxy.hold(Way.DOWN)
    yield
    proxy.release(Way.DOWN)
    running.fleet.history.append(Healed("confirms held"))


@asynccontextmanager
async def unmarked(running: FleetDrill) -> AsyncIterator[None]:
    """Lock the sent rows until the end of the block, so that no relay can mark."""
    async with await running.fleet.connect() as connection, connection.transaction():
        running.fleet.history.append(Injected("marks blocked", Reach.ALL))
        await connection.execute("LOCK TABLE outbox.message_sent IN SHARE ROW EXCLUSIVE MODE")
        yield
    running.fleet.history.append(Healed("marks blocked"))


@pytest.mark.parametrize("dies", ["nobody", "who takes", "who gives", "who gives, as it drains"])
@pytest.mark.parametrize("moment", [unconfirmed, unmarked])
async def test_lanes_stay_until_nothing_of_them_is_under_way(
    servers: FleetServers, tmp_path: Path, moment: Callable[[FleetDrill], AbstractAsyncContextManager[None]], dies: str
) -> None:
    """Lanes must move while confirms or marks are missing, and a relay dies; no lane moves early or loses its order."""
    async with drill(servers, tmp_path, "one", "two", **PATIENT) as running:
        history, one, two = running.fleet.history, *(running.fleet.relays[name].victim for name in ("one", "two"))
        history.append(Injected("away", Reach.ALL, relay="two"))
        await asyncio.to_thread(two.stop, SIGTERM)
        await running.take_over("one", "the other is stopped")
        async with moment(running):
            begun = len(history)
            await eventually(lambda: lanes_sent(running, begun) == set(range(LANES)), "rows of each lane are sent")
            await two.start()
            await eventually(lambda: has_joined(running), "the other is there, and can deliver")
            await asyncio.sleep(LOOKED_ON)
            assert running.lanes("one") == LANES
            match dies:
                case "who takes":
                    history.append(Injected("killed", Reach.ALL, forgets=True, relay="two"))
                    two.stop(SIGKILL)
                case "who gives":
                    history.append(Injected("killed", Reach.ALL, forgets=True, relay="one"))
                    one.stop(SIGKILL)
                case "who gives, as it drains":
                    history.append(Injected("killed", Reach.ALL, forgets=True, relay="one"))
                    one.tell(SIGTERM)
                    await asyncio.sleep(LOOKED_ON)
                    assert running.lanes("one") == LANES
                    one.stop(SIGKILL)
        await running.share_again()
        for victim in (one, two):
            if not victim.is_running():
                await victim.start()
        await running.share_again()
        history += [Healed("killed"), Healed("away")]

    assert dies.startswith("who gives") or running.repeats == 0


def lanes_sent(running: FleetDrill, since: int) -> set[int]:
    return {record.lane for record in running.fleet.history[since:] if isinstance(record, Published)}


async def has_joined(running: FleetDrill) -> bool:
    async with await running.fleet.connect() as connection:
        return (await connection.execute(JOINED)).rowcount == 1
