"""A message that its process dies of is found; its neighbours, which come back with it each time, are not blamed."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, WorkPolicy, on
from relay.errors import ConfigurationError
from relay.testing.servers.process import Process
from tests.consume.effects import MakeConsumer, Queue, Stumbling, Table, count, running
from tests.consume.policies import QUICK, SEVERAL_MINUTES
from tests.consume.process import COMMAND, POISON, environment
from tests.support.eventually import eventually
from tests.support.proxied import proxied

LIMIT = 3  # the lowest
NEIGHBOURS = 30

SHAPES = [
    pytest.param("quorum", {"concurrency": 3, "batch_size": 10}, id="quorum-hold"),
    pytest.param("classic", {"concurrency": 3, "batch_size": 10}, id="classic-hold"),
    pytest.param("quorum", {"concurrency": 10, "order": "skip"}, id="quorum-skip"),
]


class Restarts:
    """Restarts the consumer whenever it has died, as an orchestrator does."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.deaths = 0
        self._start = partial(Process, COMMAND, log=log, environment=environment)

    async def until(self, done: Callable[[], Awaitable[bool]]) -> None:
        process = self._start()

        async def is_done() -> bool:
            nonlocal process
            if process.is_running():
                return await done()
            assert process.returncode == -signal.SIGKILL, process.log_end()
            self.deaths += 1
            process = self._start()
            return False

        await eventually(is_done, "everything is settled", within=60)
        process.stop(signal.SIGTERM)


@pytest.mark.parametrize(("kind", "options"), SHAPES)
async def test_it_is_a_dead_letter_after_so_many_deaths_and_its_neighbours_are_applied(
    kind: str,
    options: dict[str, Any],
    *,
    queue: Queue,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
    tmp_path: Path,
    make_consumer: MakeConsumer,
) -> None:
    await queue.channel.queue_delete(queue.name)
    await queue.declare(kind)
    for number in range(NEIGHBOURS):
        if number == 3:
            await queue.send(POISON, key="poison")
        await queue.send(number, key=f"key-{number}")

    async def are_done() -> bool:
        return (
            await table.inbox_count() == NEIGHBOURS and await queue.dead_count() == 1 and await table.begun_count() == 0
        )

    restarts = Restarts(environment(inbox.database, broker, poison_limit=LIMIT, **options), tmp_path / "log")
    await restarts.until(are_done)

    assert 0 < restarts.deaths <= LIMIT
    (letter,) = await queue.dead()
    assert (letter.body, letter.headers["x-dead-reason"]) == (b"%d" % POISON, "poisoned")
    last = make_consumer(count)  # gets what was applied and not acknowledged, and comes again

    async def has_all() -> bool:
        is_alone = await queue.consumer_count() == 1  # the dead one's channel has ended, and its messages are back
        return is_alone and await queue.ready_count() == 0 and last.counters.unacknowledged == 0

    async with running(last):
        await eventually(has_all, "the queue is empty")
    assert await queue.drained()
    assert sorted(await table.numbers()) == list(range(NEIGHBOURS))
    assert await table.begun_count() == 0
    assert await table.held_count() == 0


async def test_a_held_message_that_its_process_dies_of_is_found_too(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, tmp_path: Path, make_consumer: MakeConsumer
) -> None:
    """Its claim lapses after 10 s; here that is helped."""
    await queue.send(1)
    await queue.send(2)
    handler = Stumbling({1: 1})
    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES)
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 2, "both are held")
    await table.connection.execute("UPDATE outbox.held_message SET body = %s WHERE attempts > 0", [b"%d" % POISON])

    restarts = Restarts(environment(inbox.database, broker, poison_limit=LIMIT), tmp_path / "log")
    helped: set[int] = set()

    async def are_done() -> bool:
        if restarts.deaths not in helped:  # once for each process, which passes over a row that we have locked
            helped.add(restarts.deaths)
            await table.connection.execute("UPDATE outbox.held_message SET due_at = now() WHERE due_at > now()")
        return await table.inbox_count() == 1 and await queue.dead_count() == 1

    await restarts.until(are_done)

    assert restarts.deaths == LIMIT
    (letter,) = await queue.dead()
    assert letter.headers["x-dead-reason"] == "poisoned"
    assert await table.numbers() == [2]
    assert await table.held_count() == 0


async def test_lost_connections_are_nobodys_death(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """More often than the limit, the delivery is taken back while the handler runs."""
    calls = 0
    begun = asyncio.Event()

    @on("Counted")
    async def slow(message: Message, connection: psycopg.AsyncConnection) -> None:
        nonlocal calls
        calls += 1
        begun.set()
        if calls <= LIMIT + 2:
            await asyncio.sleep(600)
        await count(message, connection)

    await queue.send(1)
    async with proxied(broker) as (proxy, far):
        consumer = Consumer(
            queue.name,
            [slow],
            inbox=inbox,
            broker=far,
            failures=FailurePolicy(poison_limit=LIMIT),
            work=WorkPolicy(backoff=QUICK, drain_timeout=0.05),
        )
        async with running(consumer):
            for _ in range(LIMIT + 2):
                await asyncio.wait_for(begun.wait(), 20)
                begun.clear()
                proxy.cut()
            await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert calls == LIMIT + 3
    assert await table.numbers() == [1]
    assert await table.begun_count() == 0


async def test_stopping_a_running_handler_is_nobodys_death(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """More often than the limit, and each time in another process."""
    begun = asyncio.Event()

    @on("Counted")
    async def hang(message: Message, connection: psycopg.AsyncConnection) -> None:
        begun.set()
        await asyncio.sleep(600)

    await queue.send(1)
    for _ in range(LIMIT + 2):
        begun.clear()
        hanging = make_consumer(hang, poison_limit=LIMIT, work=WorkPolicy(drain_timeout=0.05, concurrency=1))
        async with running(hanging):
            await asyncio.wait_for(begun.wait(), 20)
        assert await table.begun_count() == 0

    consumer = make_consumer(count, poison_limit=LIMIT)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")


async def test_tries_of_long_ago_are_forgotten(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    await table.connection.execute("""
        INSERT INTO outbox.begun_message (consumer_name, message_id, begun_at)
        VALUES ('projection', gen_random_uuid(), now() - interval '25 hours'),
            ('projection', gen_random_uuid(), now() - interval '23 hours'),
            ('another', gen_random_uuid(), now() - interval '25 hours')
    """)

    async with running(make_consumer(count)):

        async def is_forgotten() -> bool:
            return await table.begun_count() < 3

        await eventually(is_forgotten, "the old one is forgotten")

    assert await table.begun_count() == 2


async def test_what_comes_for_the_first_time_pays_nothing(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    await table.connection.execute("""
        CREATE FUNCTION forbid() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'written'; END $$;
        CREATE TRIGGER forbid BEFORE INSERT ON outbox.begun_message EXECUTE FUNCTION forbid();
    """)
    await queue.send_all(range(20))

    consumer = make_consumer(count, work=WorkPolicy(batch_size=5))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 20, "all are applied")

    assert consumer.counters.redeliveries == 0


def test_a_limit_that_would_blame_neighbours_is_refused() -> None:
    inbox = Inbox(DatabaseSettings(), "projection")

    with pytest.raises(ConfigurationError, match=r"poison_limit \(2\) is at least 3"):
        Consumer("billing", [count], inbox=inbox, broker=BrokerSettings(), failures=FailurePolicy(poison_limit=2))
