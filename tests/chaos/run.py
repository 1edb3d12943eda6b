"""Carry out a plan under load, heal everything, and ask the checker."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

from tests.chaos.fleet import NAMES, READY, WITNESS, Fleet, FleetServers, running_fleet
from tests.chaos.plan import Track, draw
from tests.chaos.remains import remains
from tests.faults.billing import WRITTEN
from tests.faults.checker import Checker, Findings
from tests.faults.delivery_path import RECOVERY, SPAN
from tests.faults.evidence import Delivered, read_table
from tests.faults.history import Healed, History, Injected
from tests.faults.owners import SLACK
from tests.faults.watch import is_ready
from tests.support.eventually import eventually

CALM_BEFORE = SPAN + 2  # seconds in which the usual rate is seen
CALM_AFTER = RECOVERY + SPAN + 2  # and in which it must come back
SHORTEST = CALM_BEFORE + CALM_AFTER + 5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has left at its end."""

    history: History
    injected: Counter[str]
    deliveries: list[Delivered]
    findings: Findings
    parked: int
    complaints: list[str]
    remains: list[str]


async def run(servers: FleetServers, seed: int, seconds: float, logs: Path, say: Say) -> Outcome:
    """Write for `seconds`, with the seed's faults in between. No other run may use the servers."""
    storm = seconds - CALM_BEFORE - CALM_AFTER
    plan = draw(seed, storm, NAMES)
    async with running_fleet(servers, seed, logs) as fleet:
        await eventually(lambda: are_ready(fleet), "all relays are ready", 30)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.writers.run(stop), name="writers")
            await asyncio.sleep(CALM_BEFORE)
            await _storm(fleet, plan, storm, say)
            say("everything is healed")
            await asyncio.sleep(CALM_AFTER)
            stop.set()
        await asyncio.sleep(SLACK)
        say("checking")
        checker = Checker(fleet.history, servers.database_url, servers.broker_url, [WITNESS], business=WRITTEN)
        findings = await checker.ask(within=60, at_rest=True)
        parked = sum(row.state == "parked" for row in await read_table(servers.database_url))
        left = await remains(servers.database_url)
        await _stop(fleet)
        fleet.complaints += fleet.overtaken()
    return Outcome(fleet.history, fleet.injected, checker.deliveries, findings, parked, fleet.complaints, left)


async def are_ready(fleet: Fleet) -> bool:
    return all([await is_ready(relay.http, READY) for relay in fleet.relays.values()])


async def _storm(fleet: Fleet, plan: list[Track], seconds: float, say: Say) -> None:
    """Carry out the plan. On a slow machine the last faults are left out, so that the calm begins in time."""
    begun = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tracks:
        for track in plan:
            tracks.create_task(_follow(fleet, track, begun, seconds, say), name="track")


async def _follow(fleet: Fleet, track: Track, begun: float, seconds: float, say: Say) -> None:
    loop = asyncio.get_running_loop()
    for planned in track:
        await asyncio.sleep(begun + planned.at - loop.time())
        if loop.time() > begun + seconds:
            say(f"{planned.what}: left out, as its time is over")
            continue
        say(f"{planned.what}, {planned.seconds:.1f} s")
        kind = planned.kind
        fleet.injected[kind.name] += 1
        fleet.history.append(Injected(planned.what, kind.reach, kind.forgets, planned.relay))
        await kind.act(fleet, planned)
        fleet.history.append(Healed(planned.what))
        say(f"{planned.number} is over")


async def _stop(fleet: Fleet) -> None:
    for relay in fleet.relays.values():
        code = await asyncio.to_thread(relay.victim.stop, SIGTERM)
        if code != 0:
            fleet.complaints.append(f"{relay.name} ended with code {code} at the end")
