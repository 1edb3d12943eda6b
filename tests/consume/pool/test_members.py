"""Members share the partitions, and hand them over without two of them working on one."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from pamqp.commands import Basic
from structlog.testing import capture_logs
from yarl import URL

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import FailurePolicy, Inbox, Message, Transient, WorkPolicy, on
from relay.consume.apply.fence import Fence
from relay.consume.failed.copy_publisher import CopyPublisher
from relay.consume.pool import Partition, PartitionedConsumer, PoolPolicy
from relay.consume.pool.candidate import Candidate
from relay.errors import ConfigurationError, QueueUnfitError
from relay.servers.postgres.database import connect_async
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import QUEUE, Table, count, running
from tests.consume.policies import QUICK, SOON
from tests.consume.pool.conftest import candidate
from tests.consume.pool.partitions import Partitions
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way

KEYS = 50


def generator(partition: Partition) -> Any:
    yield partition


@pytest.mark.parametrize("which", ["on_assigned", "on_revoked"])
@pytest.mark.parametrize(
    ("hook", "words"), [(generator, "it holds a `yield`"), (lambda: None, r"called with \(partition\)")]
)
def test_a_hook_that_cannot_run_is_refused(
    which: Any, hook: Any, words: str, inbox: Inbox, broker: BrokerSettings
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PartitionedConsumer("billing", [count], inbox=inbox, broker=broker, pool=PoolPolicy(**{which: hook}))


async def test_a_pool_takes_a_work_policy_without_concurrency(inbox: Inbox, broker: BrokerSettings) -> None:
    member = PartitionedConsumer("billing", [count], inbox=inbox, broker=broker, work=WorkPolicy(batch_size=20))

    assert member.partitions == []


class LocalMembers:
    """Members of one pool that run in this process."""

    def __init__(self, inbox: Inbox, broker: BrokerSettings) -> None:
        self.inbox = inbox
        self.broker = broker
        self.members: dict[str, PartitionedConsumer] = {}
        self.hooks: dict[str, list[tuple[str, int]]] = defaultdict(list)

    def member(self, name: str, handler: Any = count, **options: Any) -> PartitionedConsumer:
        member = PartitionedConsumer(
            "billing",
            [handler],
            inbox=self.inbox,
            broker=self.broker,
            **options,
            pool=PoolPolicy(
                member=name,
                on_assigned=lambda partition: self.hooks[name].append(("assigned", partition.number)),
                on_revoked=lambda partition: self.hooks[name].append(("revoked", partition.number)),
            ),
            work=WorkPolicy(backoff=QUICK),
        )
        self.members[name] = member
        return member

    async def shared(self, *counts: int) -> None:
        """Wait until the members hold these counts of partitions, in any order."""

        def is_so() -> bool:
            held = [len(member.partitions) for member in self.members.values()]
            return sorted(held) == sorted(counts)

        await eventually(is_so, f"partitions are shared {counts}")


@pytest.fixture
def local(inbox: Inbox, broker: BrokerSettings) -> LocalMembers:
    return LocalMembers(inbox, broker)


async def in_order(table: Table, numbers: Sequence[int], keys: int = KEYS) -> None:
    """Check that each number took effect once, in order per key."""
    for key in range(keys):
        of_key = [number for number in numbers if number % keys == key]
        assert await table.numbers(f"key-{key}") == of_key


async def test_members_come_and_go_and_each_key_keeps_its_order(
    local: LocalMembers, partitions: Partitions, table: Table, master: Candidate
) -> None:
    async with running(local.member("a")):
        await local.shared(16)
        sending = asyncio.create_task(partitions.send(range(1000), keys=KEYS))
        async with running(local.member("b")):
            await local.shared(8, 8)
            async with running(local.member("c")):
                await local.shared(6, 5, 5)
            del local.members["c"]
            await local.shared(8, 8)
        del local.members["b"]
        await local.shared(16)
        await sending
        await eventually(lambda: table_has(table, 1000), "all are applied")

    await in_order(table, range(1000))
    assert await partitions.ready_count() == 0
    for hooks in local.hooks.values():
        for partition in range(16):
            told = [what for what, number in hooks if number == partition]
            assert told == ["assigned", "revoked"] * (len(told) // 2)


async def test_a_copy_that_is_cut_off_leaves_those_of_other_partitions_alone(
    local: LocalMembers, partitions: Partitions, broker: BrokerSettings
) -> None:
    def publish(outgoing: CopyPublisher, number: int) -> asyncio.Task[None]:
        properties = Basic.Properties(message_id=f"{number}")
        return asyncio.create_task(outgoing.publish(f"{QUEUE}.dead", properties, b""))

    async with proxied(broker) as (proxy, far):
        local.broker = far
        member = local.member("a")
        one, another = (member._setup.of(Fence(partition, 1), QUEUE).outgoing for partition in (0, 1))
        await publish(one, 1)
        await publish(another, 2)
        proxy.on_frame(Way.DOWN, Basic.Ack, 3, Act.HOLD)
        cut_off = publish(one, 3)
        await proxy.wait_seen(Way.DOWN, Basic.Ack, 3)
        left = publish(another, 4)
        await proxy.wait_seen(Way.DOWN, Basic.Ack, 4)

        cut_off.cancel()
        await asyncio.wait([cut_off])
        proxy.release(Way.DOWN)
        await left  # the broker has it
        await one.close()
        await another.close()


async def table_has(table: Table, number: int) -> bool:
    return len(await table.numbers()) >= number


async def test_a_member_without_a_master_waits(local: LocalMembers, partitions: Partitions, table: Table) -> None:
    await partitions.send(range(10))
    member = local.member("a")
    async with running(member):
        await eventually(lambda: not member.hindrances(), "it is a member")
        assert member.partitions == []
        async with candidate(local.inbox.database, "late"):
            await eventually(lambda: table_has(table, 10), "they are applied")


async def test_the_messages_tell_partition_and_epoch(
    local: LocalMembers, partitions: Partitions, table: Table, master: Candidate
) -> None:
    seen: list[tuple[Any, Any]] = []

    @on("Counted")
    async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
        seen.append((message.headers["x-partition"], message.headers["x-partition-epoch"]))
        await count(message, connection)

    async with running(local.member("a", note)):
        await local.shared(16)
        await partitions.send([1])
        await eventually(lambda: table_has(table, 1), "the first is applied")
    del local.members["a"]
    async with running(local.member("b", note)):
        await partitions.send([2])
        await eventually(lambda: table_has(table, 2), "the second is applied")

    (partition, epoch), later = seen
    assert later == (partition, epoch + 1)


async def test_what_is_not_within_the_fence_commits_nothing(
    local: LocalMembers, partitions: Partitions, table: Table, master: Candidate
) -> None:
    """The epoch of a partition is raised behind its member's back: the member commits nothing."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    @on("Counted")
    async def slow(message: Message, connection: psycopg.AsyncConnection) -> None:
        await count(message, connection)
        if message.json() == 1:
            begun.set()
            await go_on.wait()

    async with running(local.member("a", slow)), await connect_async(local.inbox.database) as other:
        await local.shared(16)
        await partitions.send([1])
        await begun.wait()
        raising = asyncio.create_task(other.execute("UPDATE outbox.pool_partition SET epoch = epoch + 1"))
        await asyncio.sleep(0.3)
        assert not raising.done(), "the epoch was raised beside a transaction within the fence"
        go_on.set()
        await raising
        await partitions.send([2])
        await eventually(lambda: table_has(table, 2), "the new epoch's holder applies it")

    assert await table.numbers() == [1, 2]


async def test_the_events_tell_what_happens(
    local: LocalMembers, partitions: Partitions, database: DatabaseSettings
) -> None:
    with capture_logs() as events:
        async with candidate(database, "m"), running(local.member("a")):
            await local.shared(16)
            async with running(local.member("b")):
                await local.shared(8, 8)
            del local.members["b"]
            await local.shared(16)

    told = [event["event"] for event in events if event["event"].startswith("pool.")]
    for event in ("pool.master_assumed", "pool.member_added", "pool.partitions_assigned", "pool.partitions_wanted"):
        assert event in told
    assert [e["reason"] for e in events if e["event"] == "pool.member_removed" and e["member"] == "b"] == ["left"]


async def test_a_hook_that_fails_is_called_again_before_the_first_message(
    local: LocalMembers, partitions: Partitions, table: Table, master: Candidate
) -> None:
    calls: dict[int, int] = defaultdict(int)
    before: list[int] = []  # calls for a message's partition, when the message is applied

    def load(partition: Partition) -> Any:
        calls[partition.number] += 1
        match calls[partition.number]:
            case 1:
                raise RuntimeError("no state yet")
            case 2:
                raise StopIteration
            case 3:
                return (number for number in before)  # which loads nothing
        return asyncio.sleep(0)

    @on("Counted")
    async def count_after(message: Message, connection: psycopg.AsyncConnection) -> None:
        before.append(calls[message.headers["x-partition"]])
        await count(message, connection)

    await partitions.send(range(10))
    member = PartitionedConsumer(
        "billing",
        [count_after],
        inbox=local.inbox,
        broker=local.broker,
        pool=PoolPolicy(on_assigned=load),
        work=WorkPolicy(concurrency=1, backoff=QUICK),
    )
    with capture_logs():  # to draw each traceback takes long
        async with running(member):
            await eventually(lambda: table_has(table, 10), "all are applied")

    assert before == [4] * 10


async def test_the_state_is_loaded_anew_after_a_transaction_that_failed(
    local: LocalMembers, partitions: Partitions, table: Table, master: Candidate
) -> None:
    counts: dict[int, int] = {}  # messages by partition, as far as memory goes
    failed: set[int] = set()

    async def load(partition: Partition) -> None:
        counts[partition.number] = len(await table.numbers())

    @on("Counted")
    async def count_in_memory(message: Message, connection: psycopg.AsyncConnection) -> None:
        number, partition = message.json(), message.headers["x-partition"]
        await count(message, connection)
        counts[partition] += 1
        if number % 3 == 0 and number not in failed:
            failed.add(number)
            raise Transient

    member = PartitionedConsumer(
        "billing",
        [count_in_memory],
        inbox=local.inbox,
        broker=local.broker,
        pool=PoolPolicy(on_assigned=load),
        failures=FailurePolicy(retries=SOON),
    )
    async with running(member):
        await partitions.send(range(10))
        await eventually(lambda: table_has(table, 10), "all are applied")

    assert await table.numbers() == list(range(10))
    assert max(counts.values()) == 10


async def test_what_is_missing_is_named(local: LocalMembers) -> None:
    member = local.member("a", declare=False)

    with pytest.raises(QueueUnfitError, match=r"queue 'billing\.dead' does not exist: declare it"):
        await member.run(signals=False)


def test_more_than_one_worker_a_partition_and_keys_out_of_order_are_refused(
    inbox: Inbox, broker: BrokerSettings
) -> None:
    with pytest.raises(ConfigurationError, match=r"concurrency \(4\) is 1 in a pool"):
        PartitionedConsumer("billing", [count], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=4))
    with pytest.raises(ConfigurationError, match="order is 'hold' in a pool, not 'skip'"):
        PartitionedConsumer("billing", [count], inbox=inbox, broker=broker, failures=FailurePolicy(order="skip"))


@pytest.mark.parametrize("timeout", [0, 1e-9, -1, float("nan"), float("inf")])
def test_a_check_in_timeout_that_the_table_refuses_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigurationError, match=r"check_in_timeout \(.*\) is from 0.01 to 86400.0 seconds"):
        PoolPolicy(check_in_timeout=timeout)


def let_read(pattern: str, broker: BrokerSettings, rabbitmq: RabbitServer) -> None:
    url = URL(broker.url.get_secret_value())
    rabbitmq.ctl("set_permissions", "-p", url.path[1:], str(url.user), ".*", ".*", pattern)


async def test_a_member_that_may_read_no_queue_is_refused_and_leaves(
    local: LocalMembers, partitions: Partitions, master: Candidate, rabbitmq: RabbitServer
) -> None:
    let_read("^$", local.broker, rabbitmq)
    member = local.member("a", declare=False)

    with pytest.raises(ConfigurationError, match=r"queue 'billing\.\d+' cannot be consumed: .* Give the user of"):
        await asyncio.wait_for(member.run(signals=False), 60)

    assert member.partitions == []
    let_read(".*", local.broker, rabbitmq)
    async with running(local.member("b")):  # nothing is left with the first
        await eventually(lambda: len(local.members["b"].partitions) == 16, "the other has all partitions")


async def test_a_right_that_is_taken_from_a_running_member_is_an_outage(
    local: LocalMembers, partitions: Partitions, table: Table, master: Candidate, rabbitmq: RabbitServer
) -> None:
    async with running(local.member("a")):
        await local.shared(16)
        let_read("^$", local.broker, rabbitmq)
        rabbitmq.ctl("close_all_connections", "--vhost", URL(local.broker.url.get_secret_value()).path[1:], "test")
        await eventually(lambda: "cannot be consumed" in local.members["a"].hindrances().get("partitions", ""), "told")

        let_read(".*", local.broker, rabbitmq)
        await local.shared(16)
