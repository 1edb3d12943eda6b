"""Repeats of what was applied, as a replay sends them, are acknowledged many at once; what is new keeps its place."""

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, WorkPolicy
from tests.consume.effects import CONSUMER, Queue, Table, count, running
from tests.support.eventually import eventually

ALL = 300
NEW = [100, 101, 102, 103, 200, 299]
APPLIED = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
    SELECT %s, unnest(%s::uuid[]), '1970-01-01'
"""


async def test_repeats_take_few_transactions_and_what_is_new_among_them_keeps_its_order(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    sent = {number: await queue.send(number, key="ab"[number % 2]) for number in range(ALL)}
    applied = [message_id for number, message_id in sent.items() if number not in NEW]
    await table.connection.execute(APPLIED, [CONSUMER, applied])

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=5))
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == ALL, "all are acknowledged")

    for key in (0, 1):
        assert await table.numbers("ab"[key]) == [number for number in NEW if number % 2 == key]
    assert consumer.counters.duplicates == ALL - len(NEW)
    ((_, transactions),) = consumer.counters.times.buckets()[-1:]
    assert len(NEW) <= transactions < ALL / 2
    assert await queue.drained()
