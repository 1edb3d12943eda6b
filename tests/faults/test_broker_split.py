"""A node freezes until the others give it up, and wakes, with the relay connected to it.

RabbitMQ 3.x, under `pause_minority`: it works on, with its own list of queues; old queues are still shared. A new queue
that is declared through this node confirms messages. The queue and its messages are gone when the node restarts, and
the relay cannot know.

RabbitMQ 4.3, whose list of queues is Khepri's: a majority of the nodes must take a new queue, so nothing is lost.
"""

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import UUID

import aio_pika
import psycopg
import pytest
from aiormq.exceptions import AMQPError
from pamqp.commands import Connection, Exchange, Queue
from pydantic import SecretStr

from relay.config.settings import Settings
from tests.cli.command import Command
from tests.faults.checker import SENDING, Invariant, assert_valid, invalid, report
from tests.faults.scene import Scene, scene
from tests.faults.victim import relay_victim
from tests.support.cluster import Cluster, Node
from tests.support.eventually import eventually
from tests.support.proxy import Way

EXCHANGE = "billing"
LATE, AGAIN = "late", "late-again"  # queues; what the first had may come back with its name, if its log was still there
ROWS, KEYS, STEP = 20, 5, 200
WRITES_A_SECOND = 100
TRIES = 5
DECLARATIONS = (Exchange.Declare, Exchange.Bind, Queue.Declare, Queue.Bind)

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]


async def test_a_replay_delivers_what_a_partitioned_node_has_lost(
    cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    """A partitioned node confirms messages and then loses them; just these are missing, and a replay sends them."""
    if cluster.nodes[0].has_khepri():
        pytest.skip("with Khepri, as in RabbitMQ 4.3, no node has its own list of queues: see the test below")
    parted, *others = cluster.nodes
    vhost = f"drill_{secrets.token_hex(4)}"
    url = SecretStr(parted.add_vhost(vhost))
    on_parted = settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": url})})
    async with scene(on_parted, more_queues=[AGAIN]) as stage, relaying(stage, tmp_path):
        await stage.channel.declare_exchange(EXCHANGE, durable=True)
        async with writing(stage):
            await comes_on(stage)
            declared = declarations(stage)
            await part(parted, cluster, stage)

            await declare(LATE, parted, vhost)
            since = await now(stage)
            lost = await write_late(stage, "lost")
            await eventually(lambda: are_all(stage, lost, "sent"), "the parted node confirms them", 60)
            assert parted.is_parted()
            until = await now(stage)

            await parted.restart(signal.SIGTERM)
            await comes_on(stage)
            later = await write_late(stage, "later")
            await eventually(lambda: are_all(stage, later, "quarantined"), "nothing is bound for them any more", 60)
            await declare(AGAIN, others[0], vhost)
            await eventually(lambda: are_all(stage, later, "sent"), "they go out by themselves", 60)

        findings = await stage.checker.ask()
        assert invalid(findings) == {Invariant.NOTHING_LOST}, report(findings, findings)
        assert {UUID(words.partition(",")[0]) for words in findings[Invariant.NOTHING_LOST].words} == set(lost)
        assert declarations(stage) == declared  # on no reconnect

        environment = {"RELAY_DATABASE_URL": stage.database_url, "RELAY_BROKER_URL": cluster.urls(vhost)}
        replay = Command(tmp_path, **environment).process
        replayed = await asyncio.to_thread(replay, "replay", "--since", since, "--until", until)
        assert replayed.code == 0, replayed.err
        assert_valid(await stage.checker.ask(), *SENDING)


async def test_a_queue_declared_through_a_woken_node_outlives_its_restart(
    cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    """A node freezes, wakes, gets a new queue and messages, and restarts; queue and messages are still there."""
    if not cluster.nodes[0].has_khepri():
        pytest.skip("with Mnesia, as in RabbitMQ 3, a node may have its own list of queues: see the test above")
    woken, *others = cluster.nodes
    vhost = f"drill_{secrets.token_hex(4)}"
    await cluster.add_vhost(vhost)
    url = SecretStr(woken.url(vhost))
    on_woken = settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": url})})
    async with scene(on_woken, more_queues=[LATE]) as stage, relaying(stage, tmp_path):
        await stage.channel.declare_exchange(EXCHANGE, durable=True)
        async with writing(stage):
            await comes_on(stage)
            await freeze_until_given_up(woken, others)
            woken.thaw()
            # At once, and again until it is taken: a node that still lags must refuse, and not confirm.
            await eventually(lambda: is_declared(LATE, woken, vhost), "the woken node declares a queue", 120)
            late = await write_late(stage, "late")
            await eventually(lambda: are_all(stage, late, "sent"), "it confirms the messages", 120)

            await woken.restart(signal.SIGTERM)
            await comes_on(stage)

        assert_valid(await stage.checker.ask(), *SENDING)


async def freeze_until_given_up(node: Node, others: Sequence[Node]) -> None:
    def is_given_up() -> bool:
        return all(other.sees() == len(others) for other in others)

    node.freeze()
    await eventually(lambda: asyncio.to_thread(is_given_up), "the others give it up", 60)


async def is_declared(queue: str, node: Node, vhost: str) -> bool:
    with suppress(AMQPError, OSError, asyncio.TimeoutError):
        async with asyncio.timeout(10):
            await declare(queue, node, vhost)
            return True
    return False


async def part(node: Node, cluster: Cluster, stage: Scene) -> None:
    """Part the node from the others; the relay connects to it again, and goes on with the old queue.

    On a busy machine the node may find itself in the minority when it wakes. It then pauses, and rejoins in order.
    """
    others = [other for other in cluster.nodes if other is not node]
    for _ in range(TRIES):
        await freeze_until_given_up(node, others)
        node.thaw()
        await comes_on(stage)
        connections = connects(stage)
        stage.recorder.cut()
        await comes_on(stage)
        assert connects(stage) > connections
        if await asyncio.to_thread(node.is_parted):
            return
        await cluster.heal()
    pytest.fail(f"in {TRIES} tries the node did not part from the others")


@asynccontextmanager
async def relaying(stage: Scene, logs: Path) -> AsyncIterator[None]:
    """Run a relay whose only host is the recorder."""
    relay = relay_victim(stage.database_url, stage.settings.broker.url.get_secret_value(), logs)
    try:
        await relay.start()
        yield
        assert await asyncio.to_thread(relay.stop, signal.SIGTERM) == 0
    finally:
        await asyncio.to_thread(relay.stop, signal.SIGKILL)


@asynccontextmanager
async def writing(stage: Scene) -> AsyncIterator[None]:
    """Write to the old queue until the end of the block; then everything is delivered."""
    stop = asyncio.Event()

    async def write() -> None:
        async with await psycopg.AsyncConnection.connect(stage.database_url) as connection:
            while not stop.is_set():
                for key in range(KEYS):
                    stage.history.append(await stage.insert(connection, f"old-{key}"))
                    await connection.commit()
                await asyncio.sleep(KEYS / WRITES_A_SECOND)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write(), name="writer")
        yield
        stop.set()
    await eventually(stage.is_empty, "all is sent", 60)


async def write_late(stage: Scene, prefix: str) -> list[UUID]:
    return await stage.write(*(f"{prefix}-{row % KEYS}" for row in range(ROWS)), exchange=EXCHANGE, routing_key=LATE)


async def comes_on(stage: Scene) -> None:
    async def sent() -> int:
        return list((await stage.states()).values()).count("sent")

    goal = await sent() + STEP

    async def has_come_on() -> bool:
        return await sent() >= goal

    await eventually(has_come_on, "the relay goes on", 60)


async def declare(queue: str, node: Node, vhost: str) -> None:
    """Declare the queue through this node, and bind it for the late messages."""
    async with await aio_pika.connect(node.url(vhost)) as connection:
        channel = await connection.channel()
        declared = await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
        await declared.bind(EXCHANGE, LATE)


async def are_all(stage: Scene, messages: list[UUID], state: str) -> bool:
    states = await stage.states()
    return {states[message] for message in messages} == {state}


async def now(stage: Scene) -> str:
    row = await (await stage.connection.execute("SELECT clock_timestamp()")).fetchone()
    assert row is not None
    return str(row[0].isoformat())


def declarations(stage: Scene) -> int:
    """Return how often the relay has declared or bound anything."""
    return sum(stage.recorder.seen[Way.UP, method] for method in DECLARATIONS)


def connects(stage: Scene) -> int:
    """Return how often the broker has accepted a connection of the relay."""
    return stage.recorder.seen[Way.DOWN, Connection.OpenOk]
