"""examples/durable: producer, consumer and broker are killed, and each accepted measurement is noted once, in order."""

import asyncio
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psycopg
import pytest

from relay.testing.servers.process import run
from relay.testing.servers.rabbitmq import RabbitServer
from tests.cli.command import RELAY
from tests.faults.victim import Victim
from tests.support.eventually import eventually
from tests.support.queues import keep_queues

TOPOLOGY = Path("examples/durable/relay.toml").resolve()
SEED_VARIABLE = "TEST_SEED"  # the seed of an earlier run, to run it again
SECONDS = 60

every_buffer = pytest.mark.parametrize("buffer", ["table", "file"])


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitServer]:
    """A broker that the test may kill."""
    with RabbitServer(schedulers=1) as node:
        yield node


class Example:
    """The programs of the example, the accepted measurements, and the noted ones."""

    def __init__(self, broker: RabbitServer, database_url: str, folder: Path, buffer: str) -> None:
        self._broker = broker
        self._vhost = f"example_{secrets.token_hex(4)}"
        self._database_url = database_url
        self._environment = {
            **os.environ,
            "RELAY_DATABASE_URL": database_url,
            "RELAY_BROKER_URL": broker.add_vhost(self._vhost),
            "RELAY_CONFIG": str(TOPOLOGY),
            "RELAY_LOG_FORMAT": "json",
        }
        self._ledger = folder / "accepted.txt"
        place = ["--file", str(folder / "buffer.sqlite")] if buffer == "file" else []
        produce = [sys.executable, "-m", "examples.durable.producer", str(self._ledger), *place]
        consume = [sys.executable, "-m", "examples.durable.consumer"]
        self.producer = Victim("producer", produce, self._environment, "producer.ready", folder)
        self.consumer = Victim("consumer", consume, self._environment, "consumer.ready", folder)
        self._drain = Victim("drain", [*produce, "--sensors", "0"], self._environment, "producer.ready", folder)
        self.kills = Counter[str]()

    async def start(self) -> None:
        run([RELAY, "topology", "apply"], environment=self._environment)
        keep_queues(self._broker)
        await self.consumer.start()
        await self.producer.start()

    async def harass(self, random: Random, seconds: float) -> None:
        """Kill producer, consumer and broker again and again, at random moments."""
        until = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as tasks:
            for victim in (self.producer, self.consumer):
                tasks.create_task(self._harass(victim, Random(random.random()), until))
            tasks.create_task(self._harass_broker(Random(random.random()), until))

    async def _harass(self, victim: Victim, random: Random, until: float) -> None:
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(random.uniform(0.5, 4))
            victim.stop(signal.SIGKILL)
            self.kills[victim.name] += 1
            await asyncio.sleep(random.uniform(0, 1))
            await victim.start()

    async def _harass_broker(self, random: Random, until: float) -> None:
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(random.uniform(1, 5))
            self._broker.stop(signal.SIGKILL)
            self.kills["broker"] += 1
            await asyncio.sleep(random.uniform(0, 2))
            self._broker.launch()
            await asyncio.to_thread(self._broker.await_up)

    async def come_to_rest(self) -> None:
        """Stop the producer, send the rest of its buffer, and wait until every accepted measurement is noted."""
        assert self.producer.stop(signal.SIGTERM) == 0
        await self._drain.start()
        await eventually(lambda: not self.accepted().keys() - {id_ for id_, *_ in self.noted()}, "all is noted", 60)
        assert self._drain.stop(signal.SIGTERM) == 0
        assert self.consumer.stop(signal.SIGTERM) == 0
        self._broker.delete_vhost(self._vhost)

    def accepted(self) -> dict[str, tuple[str, int]]:
        """Return sensor and number by message id, without a line that a kill has cut."""
        lines = [line for line in self._ledger.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return {id_: (sensor, int(number)) for id_, sensor, number in map(str.split, lines)}

    def noted(self) -> list[tuple[str, str, int]]:
        """Return message id, sensor and number, in the order in which they were noted."""
        with psycopg.connect(self._database_url) as connection:
            return connection.execute(
                "SELECT message_id::text, sensor, number FROM measurement ORDER BY position"
            ).fetchall()

    def check(self) -> None:
        """Check that each accepted measurement was noted once, and those of a sensor in order."""
        accepted, noted = self.accepted(), self.noted()
        assert accepted
        ids = [id_ for id_, *_ in noted]
        assert len(ids) == len(set(ids)), "a message took effect twice"
        for sensor in {sensor for sensor, _ in accepted.values()}:
            # What was sent and not accepted, by a producer that was killed meanwhile, may come at any time.
            numbers = [number for id_, of, number in noted if of == sensor and id_ in accepted]
            assert numbers == sorted(numbers), f"{sensor} is out of order"

    def kill(self) -> None:
        for victim in (self.producer, self.consumer, self._drain):
            victim.stop(signal.SIGKILL)


@every_buffer
async def test_a_kill_of_each_program_loses_nothing_and_repeats_nothing(
    rabbitmq: RabbitServer, database_url: str, tmp_path: Path, buffer: str
) -> None:
    example = Example(rabbitmq, database_url, tmp_path, buffer)
    try:
        await example.start()
        for victim in (example.consumer, example.producer):
            count = len(example.accepted())
            await eventually(lambda: len(example.accepted()) >= count + 50, "it goes on")  # noqa: B023
            victim.stop(signal.SIGKILL)
            await victim.start()
        await example.come_to_rest()
    finally:
        example.kill()

    example.check()


@pytest.mark.drills
@pytest.mark.timeout(300)
@every_buffer
async def test_a_minute_of_kills_loses_nothing_and_repeats_nothing(
    broker: RabbitServer, database_url: str, tmp_path: Path, buffer: str
) -> None:
    """Producer, consumer and broker are killed for a minute; each accepted measurement is noted once, in order."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")  # shown when it fails
    example = Example(broker, database_url, tmp_path, buffer)
    try:
        await example.start()
        await example.harass(Random(seed), SECONDS)
        await example.come_to_rest()
    finally:
        example.kill()

    assert min(example.kills[name] for name in ("producer", "consumer", "broker")) > 0
    example.check()
