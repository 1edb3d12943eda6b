"""order = "hold": a key whose message failed waits in the table, in order, through crashes and as long as it takes."""

import asyncio
import signal
from pathlib import Path

import psycopg
import pytest
from aio_pika.abc import AbstractIncomingMessage
from aiormq.abc import DeliveredMessage
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Permanent, WorkPolicy, on
from relay.consume.classify import Failure
from relay.consume.failed.copies import Copies, Offer
from relay.consume.failed.held_table import Head, HeldTable
from relay.testing.servers.process import Process
from tests.consume.effects import CONSUMER, MakeConsumer, Queue, Stumbling, Table, count, running
from tests.consume.policies import QUICK, SEVERAL_MINUTES, SOON
from tests.consume.process import BURDEN, COMMAND, environment
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.publication import publish_all


async def test_followers_that_come_later_wait_behind_the_held_one_and_follow_in_order(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({0: 1})
    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES, work=WorkPolicy(batch_size=4))
    async with running(consumer):
        await queue.send(0, key="a")
        await eventually(lambda: consumer.counters.acknowledged == 1, "the first is held")
        await queue.send_all(range(1, 30), key="a")
        await queue.send_all(range(100, 130), key="b")
        await eventually(lambda: consumer.counters.acknowledged == 60, "all are safe")
        assert await table.numbers() == list(range(100, 130))
        assert await table.held_count() == 30
        await table.make_due()
        await eventually(lambda: consumer.counters.applied == 60, "all are applied")

    assert await table.numbers("a") == list(range(30))
    assert handler.calls[1] == 1
    assert await table.held_count() == 0
    assert await queue.drained()


async def test_a_key_is_held_and_let_go_under_a_publication_of_all_tables(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """Days of the inbox that the consumer makes meanwhile are published, too."""
    await table.connection.execute(publish_all(table.connection.info.server_version, by_root=True))
    handler = Stumbling({0: 1})
    consumer = make_consumer(handler.handle, retries=SOON)
    async with running(consumer):
        await queue.send_all(range(10), key="a")
        await eventually(lambda: consumer.counters.applied == 10, "all are applied")

    assert await table.numbers("a") == list(range(10))
    assert await table.held_count() == 0


@pytest.mark.every_postgres
async def test_an_infinite_time_that_a_console_has_written_ends_no_consumer(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    """No time can be counted until then: the time of a follower does not count, as its head is not due."""
    handler = Stumbling({0: 1})
    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES)
    async with running(consumer):
        await queue.send_all(range(3), key="a")
        await eventually(lambda: consumer.counters.acknowledged == 3, "all are held")
        await table.connection.execute("UPDATE outbox.held_message SET due_at = '-infinity' WHERE attempts = 0")
    async with running(again := make_consumer(handler.handle, retries=SEVERAL_MINUTES)):  # it looks at once
        await queue.send(10, key="b")
        await eventually(lambda: again.counters.applied == 1, "another key is applied")
        await table.connection.execute("UPDATE outbox.held_message SET due_at = now() WHERE attempts > 0")
        await eventually(lambda: again.counters.applied == 4, "all are applied")

    assert await table.numbers("a") == [0, 1, 2]


async def test_after_a_dead_letter_its_followers_go_on(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    handler = Stumbling({0: 100})
    await queue.send_all(range(10), key="a")

    consumer = make_consumer(handler.handle, retries=SOON, work=WorkPolicy(concurrency=1))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 9, "the others are applied")

    assert [letter.body for letter in await queue.dead()] == [b"0"]
    assert await table.numbers() == list(range(1, 10))
    assert await table.held_count() == 0


@pytest.mark.parametrize(
    "handler", [Stumbling({0: SOON.attempts}), Stumbling({0: 1}, Permanent("no"))], ids=["exhausted", "permanent"]
)
async def test_a_letter_sent_back_as_soon_as_it_is_there_is_not_lost(
    queue: Queue,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
    handler: Stumbling,
    make_consumer: MakeConsumer,
) -> None:
    consumer = make_consumer(handler.handle, retries=SOON)
    offer = Copies.offer
    sent_back: list[AbstractIncomingMessage] = []

    async def offer_with_a_late_confirm(copies: Copies, delivered: DeliveredMessage, failure: Failure) -> Offer:
        offered = await offer(copies, delivered, failure)
        if failure.reason is not None and not sent_back:
            sent_back.extend(await queue.dead())
            acknowledged = consumer.counters.acknowledged
            await queue.send(0, message_id=sent_back[0].message_id)
            await eventually(lambda: consumer.counters.acknowledged > acknowledged, "the copy is taken for held")
        return offered

    monkeypatch.setattr(Copies, "offer", offer_with_a_late_confirm)
    async with running(consumer):
        await queue.send(0)
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert len(sent_back) == 1
    assert await table.numbers() == [0]
    assert await table.held_count() == 0
    assert await queue.dead_count() == 0


async def test_a_handler_sees_a_held_message_as_it_came(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    seen: list[Message] = []

    @on("Counted")
    async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
        seen.append(message)
        if len(seen) == 1:
            raise RuntimeError("not today")

    await queue.send(1)
    consumer = make_consumer(note, retries=SOON)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    first, again = seen
    assert (again.message_id, again.body, again.type) == (first.message_id, first.body, first.type)
    assert (again.headers, again.routing_key, again.timestamp) == (first.headers, first.routing_key, first.timestamp)


async def test_plain_functions_are_tried_again_too(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    failures = [RuntimeError("not today")]

    @on("Counted")
    def fail_once(message: Message, connection: psycopg.Connection) -> None:
        connection.execute(
            "INSERT INTO effect (message_id, key, number) VALUES (%s, %s, %s)",
            (message.message_id, message.aggregate_id, message.json()),
        )
        if failures:
            raise failures.pop()

    await queue.send_all(range(5))
    consumer = make_consumer(fail_once, retries=SOON, work=WorkPolicy(concurrency=1))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 5, "all are applied")

    assert await table.numbers() == list(range(5))
    assert await table.held_count() == 0


async def test_a_crash_keeps_what_is_held_and_another_process_goes_on(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, tmp_path: Path, make_consumer: MakeConsumer
) -> None:
    long = {"initial": 600.0, "maximum": 600.0}
    variables = environment(inbox.database, broker, retries=long)
    for number in (BURDEN, 1, 2):
        await queue.send(number, key="a")
    process = Process(COMMAND, log=tmp_path / "log", environment=variables)

    async def all_held() -> bool:
        return await table.held_count() == 3 and await queue.ready_count() == 0

    await eventually(all_held, "all are held")
    process.stop(signal.SIGKILL)

    await queue.send(3, key="a")
    await table.make_due()
    consumer = make_consumer(count, retries=SOON)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 4, "all are applied")

    assert await table.numbers() == [BURDEN, 1, 2, 3]


async def test_several_processes_apply_each_held_message_once(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling(dict.fromkeys(range(40), 1))
    consumers = [make_consumer(handler.handle, retries=SOON, work=WorkPolicy(concurrency=2)) for _ in range(3)]
    async with running(consumers[0]), running(consumers[1]), running(consumers[2]):
        for number in range(40):
            await queue.send(number, key=f"key-{number}")

        def are_applied() -> bool:
            return sum(consumer.counters.applied for consumer in consumers) == 40

        await eventually(are_applied, "all are applied")

    assert sorted(await table.numbers()) == list(range(40))
    assert await table.held_count() == 0


async def test_a_repeat_of_a_held_message_is_acknowledged_and_held_once(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 1})
    message_id = await queue.send(1)
    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES)
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is held")
        await queue.send(1, message_id=message_id)
        await eventually(lambda: consumer.counters.acknowledged == 2, "the repeat is acknowledged")
        assert await table.held_count() == 1
        await table.make_due()
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert await table.numbers() == [1]


async def test_a_failed_try_of_a_held_message_leaves_it_held(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Stumbling({1: 2})
    await queue.send(1)
    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES)
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is held")
        await table.make_due()
        await eventually(lambda: consumer.counters.failed == 2, "it has failed again")

    row = await (
        await table.connection.execute("SELECT attempts, begun, error, due_at > now() FROM outbox.held_message")
    ).fetchone()
    assert row == (2, 0, "not today", True)
    assert await table.inbox_count() == 0


async def test_a_claim_keeps_others_away_for_ten_seconds_at_most(
    queue: Queue, table: Table, inbox: Inbox, make_consumer: MakeConsumer
) -> None:
    """A process that dies leaves it behind, and so long its key waits."""
    handler = Stumbling({1: 1})
    await queue.send(1)
    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES)
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is held")
    await table.make_due()

    assert isinstance(await HeldTable(inbox, consumer.setup.session).claim(), Head)
    await consumer.setup.session.close()

    row = await (
        await table.connection.execute("SELECT due_at <= now() + interval '10 s' FROM outbox.held_message")
    ).fetchone()
    assert row == (True,)


async def test_nothing_stays_claimed_while_there_is_no_connection_to_try_it(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    handler = Stumbling({1: 1})
    await queue.send(1)
    async with proxied(inbox.database) as (proxy, far):
        behind = Inbox(far, CONSUMER)
        consumer = Consumer(
            queue.name,
            [handler.handle],
            inbox=behind,
            broker=broker,
            failures=FailurePolicy(retries=SEVERAL_MINUTES),
            work=WorkPolicy(backoff=QUICK),
        )
        async with running(consumer):
            await eventually(lambda: consumer.counters.acknowledged == 1, "it is held")
            proxy.refusing = True
            await table.make_due()
            await eventually(lambda: proxy.refused > 0, "it is claimed")

            async def is_given_back() -> bool:
                cursor = await table.connection.execute("SELECT begun FROM outbox.held_message")
                return await cursor.fetchone() == (0,)

            await eventually(is_given_back, "the claim is given back")
            proxy.refusing = False
            await eventually(lambda: consumer.counters.applied == 1, "it is applied")


async def test_what_is_stopped_in_the_middle_is_given_back_and_counts_nothing(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    hangs, begun = asyncio.Event(), asyncio.Event()

    @on("Counted")
    async def hang(message: Message, connection: psycopg.AsyncConnection) -> None:
        if not hangs.is_set():
            hangs.set()
            raise RuntimeError("not today")
        begun.set()
        await asyncio.sleep(600)

    await queue.send(1)
    consumer = make_consumer(hang, retries=SOON, work=WorkPolicy(drain_timeout=0.1))
    with capture_logs():
        async with running(consumer):
            await asyncio.wait_for(begun.wait(), 20)

    row = await (
        await table.connection.execute("SELECT attempts, begun, due_at <= now() FROM outbox.held_message")
    ).fetchone()
    assert row == (1, 0, True)
