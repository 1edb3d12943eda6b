"""Messages that a consumer of another kind has held under this name are told of, since nobody tries them."""

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox
from relay.consume.pool import PartitionedConsumer, PoolPolicy
from tests.consume.effects import QUEUE, Queue, Stumbling, Table, count, running
from tests.consume.policies import SEVERAL_MINUTES
from tests.support.eventually import eventually

MakeConsumer = Callable[[Inbox, BrokerSettings], Consumer | PartitionedConsumer]
EVENT = "messages.left_behind"
TO_PARTITION = "UPDATE outbox.held_message SET partition = 3"


def holding(inbox: Inbox, broker: BrokerSettings) -> Consumer:
    return Consumer(QUEUE, [count], inbox=inbox, broker=broker)


def skipping(inbox: Inbox, broker: BrokerSettings) -> Consumer:
    return Consumer(
        QUEUE, [count], inbox=inbox, broker=broker, failures=FailurePolicy(order="skip", retries=SEVERAL_MINUTES)
    )


def pooled(inbox: Inbox, broker: BrokerSettings) -> PartitionedConsumer:
    return PartitionedConsumer("other", [count], inbox=inbox, broker=broker, pool=PoolPolicy(member="a"))


@pytest.mark.parametrize(
    ("make", "of_partition", "told"),
    [
        (holding, False, []),
        (holding, True, [1]),
        (pooled, False, [1]),
        (pooled, True, []),
        (skipping, False, [1]),
        (skipping, True, [1]),
    ],
)
async def test_what_this_kind_of_consumer_does_not_try_is_told(
    queue: Queue,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
    make: MakeConsumer,
    of_partition: bool,
    told: list[int],
) -> None:
    failing = Stumbling({0: 1})
    await queue.send(0)
    first = Consumer(
        QUEUE, [failing.handle], inbox=inbox, broker=broker, failures=FailurePolicy(retries=SEVERAL_MINUTES)
    )
    async with running(first):
        await eventually(lambda: first.counters.acknowledged == 1, "it is held")
    if of_partition:
        await table.connection.execute(TO_PARTITION)

    second = make(inbox, broker)
    with capture_logs() as events:
        async with running(second):
            await eventually(
                lambda: any(each["event"] in ("consumer.ready", "pool.joined") for each in events), "it runs"
            )

    assert [each["messages"] for each in events if each["event"] == EVENT] == told
