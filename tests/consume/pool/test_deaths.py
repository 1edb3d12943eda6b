"""Members and masters die, also in the same moment: nothing is lost, each key keeps its order, nobody works twice."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from tests.consume.pool.stand import Stand, standing, waiting
from tests.support.eventually import eventually

RATE = 300  # rows a second
STORM = 60.0  # seconds


@asynccontextmanager
async def under_load(stand: Stand, rate: int = RATE) -> AsyncIterator[None]:
    """Write beside the block; at the end, what was written is judged."""
    stop = asyncio.Event()
    writing = asyncio.create_task(stand.write_on(rate, stop))
    try:
        yield
    finally:
        stop.set()
        await writing
    await stand.judge()


async def test_the_consumer_and_the_master_die_at_once(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    """Two producers and one consumer; it dies, and the master before he can do anything about it.

    The slave becomes the master and cleans up; there is no member for a while, and messages wait; a new one gets first
    what the dead one had in hand.
    """
    async with standing(database, broker, tmp_path, nodes=["one", "two"], members=["first"]) as stand:
        async with under_load(stand):
            await stand.come_on()
            master = await stand.there_is_a_master({"one", "two"})
            (slave,) = {"one", "two"} - {master}

            stand.kill("first")
            stand.kill(master)

            await stand.there_is_a_master({slave})

            async def is_cleaned_up() -> bool:
                pool = await stand.pool()
                return pool is not None and not pool.members

            await eventually(is_cleaned_up, "the slave has removed the dead member")
            before = await stand.applied_count()
            await eventually(lambda: _wait(broker, RATE), "messages wait")
            assert await stand.applied_count() == before

            stand.start_member("second")
            await stand.shared("second")
            await stand.come_on()

        assert '"pool.master_assumed"' in stand.log_of(slave)
        await eventually(lambda: '"pool.stuck_drained"' in stand.log_of("second"), "it is told")


async def _wait(broker: BrokerSettings, count: int) -> bool:
    return await waiting(broker) >= count


async def test_four_deaths_in_a_row(database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path) -> None:
    """No number of exits is too many to remember: what was in hand of each is still there."""
    async with (
        standing(database, broker, tmp_path, nodes=["one", "two"], members=["a", "b"]) as stand,
        under_load(stand),
    ):
        await stand.come_on()
        for name in ("a", await stand.there_is_a_master({"one", "two"}), "b", "c"):
            if name == "b":
                stand.start_member("c")
            stand.kill(name)
            await asyncio.sleep(0.3)
        stand.start_member("d")
        await stand.shared("d")


async def test_the_master_and_all_members_die_within_a_tenth_of_a_second(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    async with (
        standing(database, broker, tmp_path, nodes=["one", "two"], members=["a", "b", "c"]) as stand,
        under_load(stand),
    ):
        await stand.come_on()
        master = await stand.there_is_a_master({"one", "two"})
        for name in ("a", "b", master, "c"):
            stand.kill(name)
        stand.start_member("d")
        stand.start_member("e")
        await stand.shared("d", "e")
        await stand.come_on()


async def test_a_member_that_is_frozen_and_wakes_up_works_on_nothing_of_another(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    async with standing(database, broker, tmp_path, nodes=["one"], members=["a", "b"]) as stand, under_load(stand):
        await stand.come_on()
        frozen = stand.members["a"]
        frozen.tell(signal.SIGSTOP)
        await stand.shared("b")
        await asyncio.sleep(10)
        frozen.tell(signal.SIGCONT)
        await stand.shared("a", "b")
        await stand.come_on()


async def test_a_master_that_is_frozen_is_followed_by_another(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    async with standing(database, broker, tmp_path, nodes=["one", "two"], members=["a"]) as stand, under_load(stand):
        master = await stand.there_is_a_master({"one", "two"})
        (slave,) = {"one", "two"} - {master}
        frozen = stand.nodes[master]
        frozen.tell(signal.SIGSTOP)
        await stand.there_is_a_master({slave})
        stand.start_member("b")
        await stand.shared("a", "b")
        frozen.tell(signal.SIGCONT)
        await stand.come_on()


@pytest.mark.drills
async def test_random_deaths_for_a_minute(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool's nodes and members are killed at random under load; each message is applied once, in order."""
    seed = random.randrange(2**32)
    with capsys.disabled():
        print(f"\nseed {seed}")
    chance = random.Random(seed)
    nodes, members = ["n1", "n2", "n3"], ["m1", "m2", "m3", "m4"]
    async with (
        standing(database, broker, tmp_path, nodes=nodes, members=members) as stand,
        under_load(stand, rate=1000),
    ):
        end = asyncio.get_running_loop().time() + STORM
        born = 4
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(chance.uniform(0.2, 4))
            for _ in range(chance.randint(1, 3)):
                born += 1
                name = chance.choice([*stand.nodes, *stand.members])
                is_node = name in stand.nodes
                stand.kill(name)
                if is_node:
                    stand.start_node(f"n{born}")
                else:
                    stand.start_member(f"m{born}")
        await stand.shared(*stand.members)
