"""Each message takes effect once, in order per key, and is acknowledged after the commit."""

from collections.abc import Sequence

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from tests.consume.effects import Queue, Table, count, count_together, running
from tests.consume.policies import QUICK
from tests.support.eventually import eventually

SHAPES = [
    pytest.param(WorkPolicy(concurrency=1, batch_size=1), id="one"),
    pytest.param(WorkPolicy(concurrency=4, batch_size=1), id="four"),
    pytest.param(WorkPolicy(concurrency=1, batch_size=50), id="batch"),
    pytest.param(WorkPolicy(concurrency=3, batch_size=20, pipeline=True), id="pipelined-batches"),
]


@on("Counted")
def count_in_thread(message: Message, connection: psycopg.Connection) -> None:
    connection.execute(
        "INSERT INTO effect (message_id, key, number) VALUES (%s, %s, %s)",
        (message.message_id, message.aggregate_id, message.json()),
    )


@pytest.mark.parametrize("work", SHAPES)
async def test_each_message_takes_effect_once_and_in_order_per_key(
    work: WorkPolicy, queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    for number in range(40):
        await queue.send_all([number], key=f"key-{number % 5}")

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 40, "all are applied")

    assert sorted(await table.numbers()) == list(range(40))
    for key in range(5):
        assert await table.numbers(f"key-{key}") == list(range(key, 40, 5))
    assert await table.inbox_count() == 40
    assert await queue.drained()
    assert (consumer.counters.duplicates, consumer.counters.failed) == (0, 0)


async def test_a_batch_handler_gets_neighbours_together_and_each_message_once(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    sizes: list[int] = []

    @on("Counted", batch=True)
    async def note(messages: Sequence[Message], connection: psycopg.AsyncConnection) -> None:
        sizes.append(len(messages))
        await count_together(messages, connection)

    @on("*")
    async def between(message: Message, connection: psycopg.AsyncConnection) -> None:
        sizes.append(0)

    repeated = await queue.send(0)
    await queue.send_all(range(1, 4))
    await queue.send(9, event_type="Renamed")
    await queue.send(0, message_id=repeated)
    await queue.send_all(range(4, 20))

    consumer = Consumer(
        queue.name, [note, between], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=1, batch_size=100)
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 21, "all are applied")

    assert await table.numbers() == list(range(20))
    assert sum(sizes) == 20
    assert max(sizes) > 1
    assert consumer.counters.duplicates == 1


async def test_plain_functions_work_in_threads(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send_all(range(20))

    consumer = Consumer(
        queue.name, [count_in_thread], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=2, batch_size=6)
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 20, "all are applied")

    assert await table.numbers() == list(range(20))
    assert await queue.drained()


@pytest.mark.parametrize("work", SHAPES)
async def test_a_repeat_is_acknowledged_without_effect_and_counted(
    work: WorkPolicy, queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    message_id = await queue.send(1)
    await queue.send(1, message_id=message_id)
    await queue.send(2)
    await queue.send(1, message_id=message_id)

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied + consumer.counters.duplicates == 4, "all are settled")

    assert await table.numbers() == [1, 2]
    assert (consumer.counters.applied, consumer.counters.duplicates) == (2, 2)
    assert await queue.drained()


async def test_consumers_of_other_names_each_apply_the_message(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    message_id = await queue.send(1)
    other = Inbox(inbox.database, "another")

    for consumer in (
        Consumer(queue.name, [count], inbox=inbox, broker=broker),
        Consumer(queue.name, [count], inbox=other, broker=broker),
    ):
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 1, "it is applied")  # noqa: B023
        await queue.send(1, message_id=message_id)

    assert await table.numbers() == [1, 1]


async def test_prefetch_is_what_can_be_worked_on(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """Eight are with the consumer, unacknowledged, and no more."""
    await queue.send_all(range(20))
    async with await psycopg.AsyncConnection.connect(inbox.database.url.get_secret_value()) as other:
        await other.execute("LOCK TABLE effect IN EXCLUSIVE MODE")  # the handlers wait

        consumer = Consumer(
            queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=2, batch_size=4)
        )
        async with running(consumer):

            async def twelve_wait() -> bool:
                return await queue.ready_count() == 12

            await eventually(twelve_wait, "twelve wait in the queue")
            assert consumer.prefetch == 8
            assert consumer.counters.applied == 0
            await other.rollback()
            await eventually(lambda: consumer.counters.applied == 20, "all are applied")


async def test_the_inbox_tells_the_business_key(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    message_id = await queue.send(1, key="invoice-7")

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    cursor = await table.connection.execute(
        "SELECT consumer_name, message_id::text, business_key FROM outbox.processed_message"
    )
    assert await cursor.fetchall() == [("projection", message_id, "invoice-7")]


async def test_messages_without_a_key_are_applied_too(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    for number in range(10):
        await queue.send(number, key=None)

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=3))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 10, "all are applied")

    assert sorted(await table.numbers()) == list(range(10))


async def test_a_handler_for_every_other_type_takes_what_no_other_takes(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    seen: list[str] = []

    @on("*")
    async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
        seen.append(message.type)

    await queue.send(1)
    await queue.send(2, event_type="Renamed")

    consumer = Consumer(queue.name, [count, note], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 2, "both are applied")

    assert await table.numbers() == [1]
    assert seen == ["Renamed"]


async def test_each_version_of_a_type_goes_to_its_handler(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    seen: list[object] = []

    @on("Counted", version=2)
    async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
        seen.append(message.headers["x-event-version"])

    for version in (1, 2, "2", "two"):
        await queue.send(1, headers={"x-event-version": version})
    await queue.send(1)

    consumer = Consumer(queue.name, [count, note], inbox=inbox, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 5, "all are applied")

    assert len(await table.numbers()) == 3
    assert seen == [2, "2"]


async def test_it_tells_when_it_is_ready_and_what_it_did(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    message_id = await queue.send(1)
    await queue.send(1, message_id=message_id)

    with capture_logs() as events:
        consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
        async with running(consumer):
            await eventually(lambda: consumer.counters.duplicates == 1, "both are settled")

    names = [event["event"] for event in events]
    assert names[:2] == ["topology.declared", "consumer.ready"]
    assert events[-1] == {
        "event": "consumer.stopped",
        "log_level": "info",
        "queue": queue.name,
        "deliveries": 2,
        "redeliveries": 0,
        "acknowledged": 2,
        "unacknowledged": 0,
        "given_back": 0,
        "applied": 1,
        "duplicates": 1,
        "failed": 0,
        "retried": {},
        "dead_letters": {},
        "held": 0,
        "repeated": 0,
        "overloads": 0,
        "paused_seconds": 0.0,
        "broker_losses": {},
        "database_losses": {},
    }
