"""Relay and consumer are killed again and again while writers roll back and commit late."""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import LiteralString

import aio_pika
import psycopg
import pytest
from yarl import URL

from relay.config.settings import Settings
from tests.faults.billing import WRITTEN, Writers
from tests.faults.checker import SENDING, Checker, assert_valid, differences
from tests.faults.history import Ending, History, Injected, Written
from tests.faults.projector import QUEUE
from tests.faults.recorder import Recorder
from tests.faults.victim import Victim
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

KILLS = 5  # of each
CALM = 3000  # messages written after the last kill
WITNESS = "witness"  # gets what the consumer gets, and is read at the end
SEED_VARIABLE = "TEST_SEED"  # the seed of an earlier run, to run it again

SENT = "SELECT count(*) FROM outbox.message WHERE state = 'sent'"
APPLIED = "SELECT count(*) FROM outbox.processed_message"
LEFT = "SELECT count(*) FROM outbox.message WHERE state <> 'sent'"
UNPROJECTED = """
    SELECT (SELECT count(*) FROM billing.invoice) - (SELECT count(*) FROM billing.invoice_projection)
"""


@pytest.mark.drills
@pytest.mark.timeout(300)
async def test_kills_rollbacks_and_late_commits_lose_invent_and_reorder_nothing(
    settings: Settings, database_url: str, broker_url: str, tmp_path: Path
) -> None:
    """Relay and consumer are killed while writers roll back and commit late; each message takes effect in order."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")  # shown when the test fails
    chance = Random(seed)
    history: History = []
    writers = Writers(database_url, seed, history)
    await writers.prepare()
    await declare_queues(broker_url, settings.broker.exchange)
    broker = URL(broker_url)
    async with (
        Recorder(history, str(broker.host), broker.port or 5672) as recorder,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as reader,
        victims(database_url, broker, recorder.port, tmp_path) as (relay, consumer),
    ):
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writers.run(stop), name="writers")
            await asyncio.gather(
                kill_repeatedly(relay, lambda: number(reader, SENT), chance, history),
                kill_repeatedly(consumer, lambda: number(reader, APPLIED), chance, history),
            )
            # A relay that starts reads everything; one that lives must find late commits by itself, too.
            goal = writers.written + CALM
            await eventually(lambda: writers.written >= goal, "writers go on for a while", 60)
            stop.set()
        await eventually(lambda: is_zero(reader, LEFT), "every row is sent", 60)
        await eventually(lambda: is_zero(reader, UNPROJECTED), "every invoice is projected", 60)
        assert (relay.stop(signal.SIGTERM), consumer.stop(signal.SIGTERM)) == (0, 0)

        findings = await Checker(history, database_url, broker_url, [WITNESS], business=WRITTEN).ask()
        projected = differences(await rows(reader, "billing.invoice"), await rows(reader, "billing.invoice_projection"))

        assert_valid(findings, *SENDING)
        assert not projected, projected[:20]
        assert writers.late
        assert any(isinstance(one, Written) and one.ending is Ending.ROLLED_BACK for one in history)


async def kill_repeatedly(
    victim: Victim,
    progress: Callable[[], Awaitable[int]],
    chance: Random,
    history: History,
    recorder: Recorder | None = None,
) -> None:
    """Kill the process after each bit of progress, and start it again."""
    for _ in range(KILLS):
        goal = await progress() + chance.randrange(1, 400)

        async def has_come_on(goal: int = goal) -> bool:
            return await progress() >= goal

        await eventually(has_come_on, f"{victim.name} works after start {victim.starts}", 60)
        await asyncio.to_thread(victim.stop, signal.SIGKILL)
        if recorder is not None:  # what it has sent is still on its way through us, and was sent before
            await eventually(lambda: not recorder.connections, "all that it has sent has passed", 60)
        history.append(Injected(f"{victim.name} killed", forgets=True))
        await victim.start()


async def declare_queues(broker_url: str, exchange_name: str) -> None:
    """Declare the consumer's queue and the witness, both bound to everything that the relay publishes."""
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        for name in (QUEUE, WITNESS):
            await declare_bound(channel, name, exchange_name)


@asynccontextmanager
async def victims(database_url: str, broker: URL, recorder: int, logs: Path) -> AsyncIterator[tuple[Victim, Victim]]:
    """Yield relay (through the recorder's port) and consumer; both end with the block."""
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": database_url,
        "RELAY_BROKER_URL": str(broker),
        "RELAY_NODE": "victim",
        "RELAY_LOG_FORMAT": "json",
    }
    programs = Path(sys.executable).parent
    recorded = environment | {"RELAY_BROKER_URL": str(broker.with_port(recorder))}
    relay = Victim("relay", [programs / "relay", "run"], recorded, "relay.ready", logs)
    projector = [sys.executable, "-m", "tests.faults.projector"]
    consumer = Victim("consumer", projector, environment, "consumer.ready", logs)
    with ExitStack() as started:
        for victim in (relay, consumer):
            started.callback(victim.stop, signal.SIGKILL)
            await victim.start()
        yield relay, consumer


async def number(reader: psycopg.AsyncConnection, query: LiteralString) -> int:
    row = await (await reader.execute(query)).fetchone()
    return int(row[0]) if row else 0


async def is_zero(reader: psycopg.AsyncConnection, query: LiteralString) -> bool:
    return await number(reader, query) == 0


async def rows(reader: psycopg.AsyncConnection, table: LiteralString) -> list[tuple[object, ...]]:
    return await (await reader.execute(f"SELECT * FROM {table}")).fetchall()
