"""A consumer fails over by the list of hosts in RELAY_BROKER_URL, and declares nothing there."""

import pytest
from pamqp.commands import Basic, Exchange
from pamqp.commands import Queue as Methods

from relay.config.settings import Settings
from relay.consume import Consumer, Inbox, WorkPolicy
from relay.consume.failed.copy_publisher import CopyPublisher, CopyRefusedError
from tests.consume.effects import Queue, Table, count, running
from tests.consume.policies import QUICK
from tests.faults.hosts import broker_host, to_hosts, two_hosts
from tests.support.deaf import DeafProxy
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way

DECLARATIONS = {Exchange.Declare, Exchange.Bind, Methods.Declare, Methods.Bind}


def sent_to(proxy: FaultProxy) -> set[object]:
    return {method for way, method in proxy.seen if way is Way.UP}


async def test_a_host_that_is_dead_from_the_start_is_passed_over(
    queue: Queue, table: Table, inbox: Inbox, settings: Settings
) -> None:
    await queue.send(1)
    async with two_hosts(settings) as (first, second):
        first.refusing = True
        consumer = Consumer(queue.name, [count], inbox=inbox, broker=to_hosts(settings, first, second).broker)
        async with running(consumer):
            await eventually(lambda: consumer.counters.acknowledged == 1, "it is settled")

    assert await table.numbers() == [1]
    assert Basic.Consume in sent_to(second)


async def test_after_a_loss_the_next_host_comes_first_and_nothing_is_declared(
    queue: Queue, table: Table, inbox: Inbox, settings: Settings
) -> None:
    await queue.send(1)
    async with two_hosts(settings) as (first, second):
        # Who tried the lost host first would wait for its greeting until the test is over.
        patient = to_hosts(settings, first, second, connect_timeout=600.0).broker
        consumer = Consumer(queue.name, [count], inbox=inbox, broker=patient, work=WorkPolicy(backoff=QUICK))
        async with running(consumer):
            await eventually(lambda: consumer.counters.acknowledged == 1, "it is settled")
            assert second.connections == 0

            first.hold(Way.DOWN)  # it takes connections, and says nothing
            first.cut()
            await queue.send(2)
            counters = consumer.counters  # the ack of the first may be lost with its host: then that one comes again
            await eventually(lambda: counters.acknowledged == 2 + counters.duplicates, "it is settled")

    assert await table.numbers() == [1, 2]
    assert consumer.counters.broker_losses == {"lost": 1}
    # In a split a node may take declarations, give messages to them and lose both.
    assert sent_to(second) & DECLARATIONS == set()


async def test_a_host_that_confirms_no_copy_is_left_for_the_next(queue: Queue, settings: Settings) -> None:
    host = broker_host(settings)
    async with DeafProxy(*host) as deaf, FaultProxy(*host) as other:
        outgoing = CopyPublisher(to_hosts(settings, deaf, other, confirm_timeout=3.0).broker, "copies")
        with pytest.raises(CopyRefusedError, match="no answer within 3 s"):
            await outgoing.publish(queue.name, Basic.Properties(message_id="1"), b"")

        await outgoing.publish(queue.name, Basic.Properties(message_id="1"), b"")
        await outgoing.close()


async def test_what_was_in_hand_when_a_host_was_lost_takes_effect_once(
    queue: Queue, table: Table, inbox: Inbox, settings: Settings
) -> None:
    async with two_hosts(settings) as (first, second):
        hosts = to_hosts(settings, first, second).broker
        consumer = Consumer(
            queue.name, [count], inbox=inbox, broker=hosts, work=WorkPolicy(backoff=QUICK, concurrency=4)
        )
        async with running(consumer):
            for number in range(200):
                await queue.send(number, key=f"key-{number % 7}")
                if number % 40 == 20:
                    await eventually(lambda: consumer.counters.applied > number - 20, "it works")  # noqa: B023
                    first.cut()
                    second.cut()
            await eventually(lambda: consumer.counters.applied == 200, "all are applied")

    for key in range(7):
        assert await table.numbers(f"key-{key}") == list(range(key, 200, 7))
    assert await queue.drained()
