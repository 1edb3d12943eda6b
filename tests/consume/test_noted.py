"""A consumer notes what it handles, and `relay reconcile` expects that of it."""

import asyncio
from uuid import UUID

import psycopg
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, Permanent, on
from relay.consume.pool import PartitionedConsumer
from relay.operate.reconcile.ask import Reconciled, ReconcileRequest, ask
from tests.consume.effects import CONSUMER, MakeConsumer, Queue, Table, count, running
from tests.support.eventually import eventually

SEND = """
    INSERT INTO outbox.message (message_id, aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    VALUES (%s, 'counter', 'a', %s, '1', 'sent', now() - interval '2 minutes')
"""
NOTED = "SELECT consumer_name, queue, event_types FROM outbox.consumer_queue ORDER BY consumer_name, queue"


@on("Refused")
async def refuse(message: Message, connection: psycopg.AsyncConnection) -> None:
    raise Permanent("no")


@on("*")
async def take_all(message: Message, connection: psycopg.AsyncConnection) -> None:
    pass


async def noted(table: Table) -> list[tuple[object, ...]]:
    return await (await table.connection.execute(NOTED)).fetchall()


async def test_a_consumer_notes_its_queue_and_types_at_each_start(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    for handlers, event_types in (([count, refuse], ["Counted", "Refused"]), ([count, take_all], None)):
        consumer = make_consumer(*handlers)
        async with running(consumer):
            await eventually(lambda: not consumer.hindrances(), "it is ready")  # noqa: B023 (awaited here)

        assert await noted(table) == [(CONSUMER, queue.name, event_types)]


async def test_so_does_a_member_of_a_pool(table: Table, inbox: Inbox, broker: BrokerSettings) -> None:
    member = PartitionedConsumer("totals", [count], inbox=inbox, broker=broker)
    async with running(member):
        await eventually(lambda: is_noted(table), "it has noted what it handles")

    assert await noted(table) == [(CONSUMER, "totals", ["Counted"])]


async def is_noted(table: Table) -> bool:
    return bool(await noted(table))


async def test_it_consumes_where_it_may_not_note(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    await table.connection.execute("DROP TABLE outbox.consumer_queue")
    await queue.send(1)

    consumer = make_consumer(count)
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert [event["event"] for event in events if event["log_level"] == "warning"] == ["consumer.not_noted"]


async def test_two_consumers_of_other_types_and_a_dead_letter_are_told_apart(
    queue: Queue, table: Table, database: DatabaseSettings, broker: BrokerSettings
) -> None:
    other = Queue(queue.channel, "audit")
    await other.declare()
    counted, refused = await queue.send(1), await other.send(2, event_type="Refused")
    for message_id, event_type in ((counted, "Counted"), (refused, "Refused")):
        await table.connection.execute(SEND, [UUID(message_id), event_type])

    one = Consumer(queue.name, [count], inbox=Inbox(database, "counting"), broker=broker)
    two = Consumer(other.name, [refuse], inbox=Inbox(database, "auditing"), broker=broker)
    async with running(one), running(two):
        await eventually(lambda: one.counters.applied == 1, "the one is applied")
        await eventually(lambda: two.counters.dead_letters["permanent"] == 1, "the other is a dead letter")
    told = await compare(database, broker)
    told_without_broker = await compare(database, None)

    auditing, counting = told.report.consumers
    assert (counting.expected, counting.applied, counting.missing, counting.dead) == (1, 1, 0, 0)
    assert (auditing.expected, auditing.applied, auditing.missing, auditing.dead) == (1, 0, 0, 1)
    assert told.report.differences == ["1 of 1 that were sent are dead letters of auditing, in audit.dead"]
    assert told.report.mend is None
    assert told_without_broker.report.differences == ["1 of 1 that were sent are not in the inbox of auditing"]


async def compare(database: DatabaseSettings, broker: BrokerSettings | None) -> Reconciled:
    asked = ReconcileRequest(since="1h", consumers=["counting", "auditing"])
    return await asyncio.to_thread(ask, database, database, asked, timeout=60, broker=broker)
