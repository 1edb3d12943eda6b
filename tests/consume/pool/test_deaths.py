"""Members and masters die, also at the same moment: nothing is lost or applied twice, and each key keeps its order."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from tests.consume.pool.processes import PoolProcesses, pool_processes, waiting
from tests.support.eventually import eventually

pytestmark = pytest.mark.drills

RATE = 300  # rows a second
STORM = 60.0  # seconds


@asynccontextmanager
async def under_load(processes: PoolProcesses, rate: int = RATE) -> AsyncIterator[None]:
    """Write rows until the end of the block, and then judge them."""
    stop = asyncio.Event()
    writing = asyncio.create_task(processes.write_on(rate, stop))
    try:
        yield
    finally:
        stop.set()
        await writing
    await processes.judge()


async def test_the_consumer_and_the_master_die_at_once(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    """The only member dies with the master: messages wait until a new one gets all, first what the dead one had."""
    async with pool_processes(database, broker, tmp_path, nodes=["one", "two"], members=["first"]) as processes:
        async with under_load(processes):
            await processes.come_on()
            master = await processes.there_is_a_master({"one", "two"})
            (slave,) = {"one", "two"} - {master}

            processes.kill("first")
            processes.kill(master)

            await processes.there_is_a_master({slave})

            async def is_cleaned_up() -> bool:
                pool = await processes.pool()
                return pool is not None and not pool.members

            await eventually(is_cleaned_up, "the slave has removed the dead member")
            before = await processes.applied_count()
            await eventually(lambda: _wait(broker, RATE), "messages wait")
            assert await processes.applied_count() == before

            processes.start_member("second")
            await processes.shared("second")
            await processes.come_on()

        assert '"pool.master_assumed"' in processes.log_of(slave)
        await eventually(lambda: '"pool.stuck_drained"' in processes.log_of("second"), "it is told")


async def _wait(broker: BrokerSettings, count: int) -> bool:
    return await waiting(broker) >= count


async def test_four_deaths_in_a_row(database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path) -> None:
    """Four members die in a row; what each of them had in hand is applied, in order."""
    async with (
        pool_processes(database, broker, tmp_path, nodes=["one", "two"], members=["a", "b"]) as processes,
        under_load(processes),
    ):
        await processes.come_on()
        for name in ("a", await processes.there_is_a_master({"one", "two"}), "b", "c"):
            if name == "b":
                processes.start_member("c")
            processes.kill(name)
            await asyncio.sleep(0.3)
        processes.start_member("d")
        await processes.shared("d")


async def test_the_master_and_all_members_die_within_a_tenth_of_a_second(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    """The master and all members die at once; two new members share the partitions and apply all, in order."""
    async with (
        pool_processes(database, broker, tmp_path, nodes=["one", "two"], members=["a", "b", "c"]) as processes,
        under_load(processes),
    ):
        await processes.come_on()
        master = await processes.there_is_a_master({"one", "two"})
        for name in ("a", "b", master, "c"):
            processes.kill(name)
        processes.start_member("d")
        processes.start_member("e")
        await processes.shared("d", "e")
        await processes.come_on()


async def test_a_member_that_is_frozen_and_wakes_up_works_on_nothing_of_another(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    """A member freezes until another has its partitions; awake again, it applies nothing of them."""
    async with (
        pool_processes(database, broker, tmp_path, nodes=["one"], members=["a", "b"]) as processes,
        under_load(processes),
    ):
        await processes.come_on()
        frozen = processes.members["a"]
        frozen.tell(signal.SIGSTOP)
        await processes.shared("b")
        await asyncio.sleep(10)
        frozen.tell(signal.SIGCONT)
        await processes.shared("a", "b")
        await processes.come_on()


async def test_a_master_that_is_frozen_is_followed_by_another(
    database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path
) -> None:
    """The master freezes; the second node becomes the master, and a new member gets its share."""
    async with (
        pool_processes(database, broker, tmp_path, nodes=["one", "two"], members=["a"]) as processes,
        under_load(processes),
    ):
        master = await processes.there_is_a_master({"one", "two"})
        (slave,) = {"one", "two"} - {master}
        frozen = processes.nodes[master]
        frozen.tell(signal.SIGSTOP)
        await processes.there_is_a_master({slave})
        processes.start_member("b")
        await processes.shared("a", "b")
        frozen.tell(signal.SIGCONT)
        await processes.come_on()


@pytest.mark.timeout(240)
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
        pool_processes(database, broker, tmp_path, nodes=nodes, members=members) as processes,
        under_load(processes, rate=1000),
    ):
        end = asyncio.get_running_loop().time() + STORM
        born = 4
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(chance.uniform(0.2, 4))
            for _ in range(chance.randint(1, 3)):
                born += 1
                name = chance.choice([*processes.nodes, *processes.members])
                is_node = name in processes.nodes
                processes.kill(name)
                if is_node:
                    processes.start_node(f"n{born}")
                else:
                    processes.start_member(f"m{born}")
        await processes.shared(*processes.members)
