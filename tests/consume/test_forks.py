"""A fork is told that it cannot use what its parent has run or connected; what was only made may run in it."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, on
from relay.consume.pool import PartitionedConsumer
from tests.consume.effects import CONSUMER, MakeConsumer, Queue, running
from tests.consume.sqlalchemy_handlers import KINDS
from tests.support.eventually import eventually
from tests.support.fork import REFUSED, code_of_fork, watched_by

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@on("Counted")
async def ignore(message: Message, connection: object) -> None:
    pass


@on("Counted")
def ignore_in_thread(message: Message, connection: object) -> None:
    pass


def run_until_ready(consumer: Consumer) -> None:
    """Run it in a new event loop until it is ready."""

    async def run() -> None:
        async with running(consumer) as task:
            await eventually(lambda: task.done() or not consumer.hindrances(), "it is ready")
            if task.done():
                task.result()

    asyncio.run(run())


USES: dict[str, Callable[[Consumer], object]] = {
    "run": run_until_ready,
    "ready_count": lambda consumer: asyncio.run(consumer.ready_count()),
    "stop": lambda consumer: consumer.stop(),
    "reload": lambda consumer: consumer.reload(),
}


@pytest.mark.parametrize("use", USES)
async def test_a_fork_cannot_use_a_consumer_that_its_parent_runs(make_consumer: MakeConsumer, use: str) -> None:
    consumer = make_consumer(ignore)
    async with running(consumer):
        await eventually(lambda: not consumer.hindrances(), "it is ready")

        assert code_of_fork(lambda: USES[use](consumer)) == REFUSED

        assert not consumer.hindrances()


async def test_a_fork_may_run_a_consumer_that_its_parent_has_only_made(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(ignore)

    assert code_of_fork(lambda: run_until_ready(consumer)) == 0


async def test_a_consumer_of_the_parent_is_not_ready_in_a_fork(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(ignore)
    async with running(consumer):
        await eventually(lambda: not consumer.hindrances(), "it is ready")

        def look() -> None:
            assert "is its fork" in consumer.hindrances()["consumer"]

        assert code_of_fork(look) == 0


async def test_a_fork_watches_nothing_for_the_event_loop_of_a_consumer(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(ignore)
    loop = asyncio.get_running_loop()
    async with running(consumer):
        await eventually(lambda: not consumer.hindrances(), "it is ready")

        def look() -> None:
            assert not watched_by(loop)

        assert code_of_fork(look) == 0
        assert watched_by(loop)


async def test_a_fork_has_the_signals_that_its_parents_consumer_takes(make_consumer: MakeConsumer) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    consumer = make_consumer(ignore)
    task = asyncio.create_task(consumer.run(signals=True))
    await eventually(lambda: not consumer.hindrances(), "it is ready")

    code = code_of_fork(lambda: os.kill(os.getpid(), signal.SIGTERM))

    assert code == -signal.SIGTERM
    assert not task.done()
    consumer.stop()
    await task
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_cannot_use_the_connections_in_the_pool_of_its_parents_inbox(
    queue: Queue, targets: dict[str, Any], broker: BrokerSettings, kind: str
) -> None:
    target = targets[kind]
    engine = target if isinstance(target, sa.Engine | AsyncEngine) else target.kw["bind"]
    handler = ignore if isinstance(engine, AsyncEngine) else ignore_in_thread
    consumer = Consumer(queue.name, [handler], inbox=Inbox(target, CONSUMER), broker=broker)
    assert code_of_fork(lambda: run_until_ready(consumer)) == 0  # nothing is in the pool
    await connect(engine)

    def dispose_and_run() -> None:
        if isinstance(engine, AsyncEngine):
            engine.sync_engine.dispose(close=False)
        else:
            engine.dispose(close=False)
        run_until_ready(consumer)

    assert code_of_fork(lambda: run_until_ready(consumer)) == REFUSED
    assert code_of_fork(dispose_and_run) == 0
    await connect(engine)


async def connect(engine: sa.Engine | AsyncEngine) -> None:
    """Use a connection, and leave it in the pool."""
    if isinstance(engine, AsyncEngine):
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
    else:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")


async def test_a_member_of_a_pool_cannot_run_in_a_fork_as_it_would_have_the_name_of_others(
    inbox: Inbox, broker: BrokerSettings
) -> None:
    member = PartitionedConsumer("totals", [ignore], inbox=inbox, broker=broker)

    assert code_of_fork(lambda: asyncio.run(member.run())) == REFUSED
