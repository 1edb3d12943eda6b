"""A member of a pool whose delivery is unacknowledged for too long (`consumer_timeout`) goes on with its partition."""

import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Inbox
from relay.consume.pool import PartitionedConsumer, PoolPolicy
from tests.consume.delivery_timeout import WORK, Hanging
from tests.consume.effects import Table, running
from tests.consume.pool.partitions import Partitions
from tests.support.events import named, times
from tests.support.eventually import eventually


@pytest.mark.usefixtures("short_timeout", "master")
async def test_a_member_of_a_pool_says_it_too_and_keeps_its_partition(
    partitions: Partitions, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    handler = Hanging()
    policy = PoolPolicy(member="a", check_in_timeout=60.0)  # it is not taken for dead first
    member = PartitionedConsumer(partitions.name, [handler.handle], inbox=inbox, broker=broker, pool=policy, work=WORK)
    with capture_logs() as events:
        async with running(member):
            await eventually(lambda: len(member.partitions) == 16, "it has all partitions")
            await partitions.send([1, 2])
            await eventually(lambda: member.counters.applied == 2, "both are applied")

    assert await table.numbers() == [1, 2]
    assert named(events, "consumer.timed_out")[0]["queue"].startswith(f"{partitions.name}.")
    assert times(events, "pool.partition_lost") == 0
    assert await table.begun_count() == 0
