"""A broker is silent for a while under steady load: what an operator sees meanwhile, and how delivery recovers."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from relay.config.settings import Settings
from relay.testing.servers.process import free_port
from tests.faults.checker import Invariant, assert_valid
from tests.faults.delivery_path import NOTICED_WITHIN, RECOVERY, SPAN
from tests.faults.history import Healed, Injected, Reach
from tests.faults.scene import Scene, scene
from tests.faults.victim import Victim
from tests.faults.watch import watched
from tests.support.proxy import Way

pytestmark = [pytest.mark.drills, pytest.mark.timeout(180)]

PAUSE = 0.02  # seconds between two messages
SILENCE = NOTICED_WITHIN + 2


async def test_the_broker_falls_silent_under_steady_load(settings: Settings, tmp_path: Path) -> None:
    """The broker stops answering under steady load; the relay reports it, recovers, and keeps every invariant."""
    http = f"127.0.0.1:{free_port()}"
    async with scene(settings) as stage:
        relay = victim(stage, http, tmp_path)
        try:
            await relay.start()
            async with (
                watched(stage.history, settings.database.url.get_secret_value(), http=http, pid=relay.pid),
                asyncio.TaskGroup() as tasks,
            ):
                stop = asyncio.Event()
                writing = tasks.create_task(write_steadily(stage, stop), name="writer")
                await asyncio.sleep(SPAN + 1)  # time is what this is about
                stage.history.append(Injected("silence", Reach.ALL))
                stage.recorder.hold(Way.DOWN)
                await asyncio.sleep(SILENCE)
                stage.recorder.release(Way.DOWN)
                stage.history.append(Healed("silence"))
                await asyncio.sleep(RECOVERY + SPAN + 1)
                stop.set()
                await writing
                findings = await stage.checker.ask()
        finally:
            await asyncio.to_thread(relay.stop, signal.SIGKILL)

    # Silence hits all, and there is one relay.
    assert_valid(findings, *(set(Invariant) - {Invariant.INNOCENT_KEYS, Invariant.ONE_OWNER}))


def victim(stage: Scene, http: str, logs: Path) -> Victim:
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": stage.settings.database.url.get_secret_value(),
        "RELAY_BROKER_URL": stage.settings.broker.url.get_secret_value(),
        "RELAY_BROKER_CONFIRM_TIMEOUT": "5",
        "RELAY_STALL_AFTER": "5",
        "RELAY_HTTP_LISTEN": http,
        "RELAY_LOG_FORMAT": "json",
    }
    return Victim("relay", [Path(sys.executable).parent / "relay", "run"], environment, "relay.ready", logs)


async def write_steadily(stage: Scene, stop: asyncio.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        await stage.write(f"{number % 50}")
        await asyncio.sleep(PAUSE)
