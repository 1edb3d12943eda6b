"""The files that a newcomer opens to follow one message from the queue to the inbox."""

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox
from tests.consume.effects import Queue, Table, count, running
from tests.doors import PASSAGES, doors
from tests.support.eventually import eventually


async def test_a_message_passes_through_ten_files(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)

    async def passage() -> None:
        acknowledged = consumer.counters.acknowledged
        await queue.send(1)
        await eventually(lambda: consumer.counters.acknowledged > acknowledged, "the message is acknowledged")

    async with running(consumer):
        await eventually(lambda: not consumer.hindrances(), "the consumer is ready")
        opened = await doors("relay/consume", passage)

    assert await table.numbers() == [1] * PASSAGES
    assert sorted(opened) == [
        "relay/consume/apply/handlers.py",
        "relay/consume/apply/inbox.py",
        "relay/consume/apply/transactions.py",
        "relay/consume/channel.py",
        "relay/consume/consumer.py",
        "relay/consume/failed/envelope.py",
        "relay/consume/failed/poison.py",
        "relay/consume/hindrances.py",
        "relay/consume/message.py",
        "relay/consume/worker.py",
    ]
