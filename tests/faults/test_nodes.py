"""Several relays on one table: one is frozen, cut off on either side, or all are restarted one after the other."""

import asyncio
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM

import pytest

from tests.chaos.fleet import FleetServers
from tests.faults.history import Healed, History, Injected, Published, Reach, Written
from tests.faults.owners import belated
from tests.faults.relays import drill
from tests.support.proxy import FaultProxy, Way

pytestmark = pytest.mark.drills

LONGEST_GAP = 5.0  # seconds that a message waits while a relay is restarted


async def test_a_relay_frozen_past_its_lock_wakes_without_it(servers: FleetServers, tmp_path: Path) -> None:
    """A relay freezes until another has its lanes; awake again, it sends next to nothing of them."""
    async with drill(servers, tmp_path, "one", "two") as running:
        history, victim = running.fleet.history, running.fleet.relays["one"].victim
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
    servers: FleetServers, tmp_path: Path, side: str
) -> None:
    """A relay is cut off from broker or database; the other relay takes its lanes, and nothing is sent late."""
    async with drill(servers, tmp_path, "one", "two") as running:
        history, relay = running.fleet.history, running.fleet.relays["one"]
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


async def test_a_rolling_restart_sends_nothing_twice_and_stops_nothing(servers: FleetServers, tmp_path: Path) -> None:
    """Three relays restart one after the other; no message is repeated, and no message waits for long."""
    async with drill(servers, tmp_path, "one", "two", "three") as running:
        begun = len(running.fleet.history)
        for name, relay in running.fleet.relays.items():
            running.fleet.history.append(Injected(f"roll {name}", Reach.ALL, relay=name))
            assert await asyncio.to_thread(relay.victim.stop, SIGTERM) == 0
            await relay.victim.start()
            await running.share_again()
            running.fleet.history.append(Healed(f"roll {name}"))
        rolled = running.fleet.history[begun:]

    assert running.repeats == 0
    wait = longest_wait(rolled)
    print(f"longest wait {wait:.2f} s")
    assert wait < LONGEST_GAP


def longest_wait(history: History) -> float:
    """Return the longest time from a commit to the message's frame, in seconds."""
    committed_at = {one.message_id: one.at for one in history if isinstance(one, Written)}
    sent_at = {one.message_id: one.at for one in reversed(history) if isinstance(one, Published)}
    return max(sent_at[id_] - committed_at[id_] for id_ in committed_at.keys() & sent_at.keys())
