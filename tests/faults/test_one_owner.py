"""Two relays on one table, and what the checker finds if they take lanes without the lock."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import psycopg
import pytest
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import Settings
from relay.engine.node import Node
from tests.faults.checker import Findings, Invariant, assert_valid, invalid
from tests.faults.history import Published
from tests.faults.owners import SLACK
from tests.faults.recorder import Recorder
from tests.faults.scene import QUICK, Scene, scene
from tests.faults.watch import looked_at
from tests.faults.without_lock import WITHOUT_LOCK
from tests.support.eventually import eventually

NAMES = ("one", "two")
KEYS = [f"key-{number}" for number in range(40)]
SENT_WHILE_WATCHED = 400  # messages


@pytest.mark.parametrize("has_bug", [False, True], ids=["as it is", "without the lock"])
async def test_a_lane_that_two_relays_take_turns_the_owner_red(
    settings: Settings, database_url: str, has_bug: bool
) -> None:
    """A planted bug gives one lane to two relays; the checker finds that, and finds nothing without the bug."""
    if has_bug:
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
            await connection.execute(WITHOUT_LOCK)

    findings = await run(settings, database_url, has_bug=has_bug)

    if has_bug:
        assert Invariant.ONE_OWNER in invalid(findings)
    else:
        assert_valid(findings, Invariant.NOTHING_LOST, Invariant.REPEATS_ARE_THE_SAME, Invariant.ONE_OWNER)


async def run(settings: Settings, database_url: str, *, has_bug: bool) -> Findings:
    retry, more = (5, 1) if has_bug else (60, 60)
    async with scene(settings) as stage, two_relays(settings, stage), looked_at(stage.history, database_url):
        await asyncio.sleep(SLACK)  # the judge wants looks from before the first message
        while stage.times(Published) < SENT_WHILE_WATCHED:
            await stage.write(*KEYS)
            await asyncio.sleep(0.02)
        with suppress(TimeoutError):  # with the bug, some lanes are nobody's
            await eventually(stage.is_empty, "everything is sent", retry)
        await asyncio.sleep(SLACK)  # and from after the last
        return await stage.checker.ask(within=more)


@asynccontextmanager
async def two_relays(settings: Settings, stage: Scene) -> AsyncIterator[None]:
    """Run two relays, each through its own recorder; on entry both have looked for lanes."""
    url = URL(settings.broker.url.get_secret_value())
    async with AsyncExitStack() as recording, asyncio.TaskGroup() as running:
        nodes = []
        for name in NAMES:
            recorder = await recording.enter_async_context(
                Recorder(stage.history, str(url.host), url.port or 5672, relay=name)
            )
            broker = settings.broker.model_copy(update={"url": SecretStr(str(url.with_port(recorder.port)))})
            relay = settings.relay.model_copy(update={**QUICK, "node": name})
            nodes.append(Node(settings.model_copy(update={"broker": broker, "relay": relay})))
            running.create_task(nodes[-1].run(), name=name)
        await eventually(lambda: are_there(stage), "both relays have told that they live")
        yield
        for node in nodes:
            node.start_draining()


async def are_there(stage: Scene) -> bool:
    return (await stage.connection.execute("SELECT FROM outbox.node")).rowcount == len(NAMES)
