"""`/livez` and `/readyz` of a consumer: whether its process works, whether it does, and why not."""

import threading
from typing import Any

import psycopg
import pytest

import relay.probes.server as served
from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Overload, WorkPolicy, hindrances, on, startup
from relay.consume.failed import held_messages
from relay.probes.consumer import answering_for
from tests.consume.effects import Queue, Stumbling, Table, count, running
from tests.consume.policies import QUICK, SEVERAL_MINUTES
from tests.http.consumers import ORDERS, Hanging, inbox, queue, serving, table
from tests.http.site import Answer, Site
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import FaultProxy, Way

__all__ = ["inbox", "queue", "table"]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hindrances, "STALL_LOOK", 0.05)
    monkeypatch.setattr(startup, "ASK_INTERVAL", 0.1)
    monkeypatch.setattr(held_messages, "LEFT_BEHIND_LOOK", 0.1)


async def assert_unready_while_refused(site: Site, proxy: FaultProxy, reason: str) -> None:
    proxy.refusing = True
    proxy.cut()
    await eventually(lambda: site.is_unready(reason), "unready")
    assert (await site.get("/livez")).status == 200

    proxy.refusing = False
    await eventually(site.is_ready, "ready again")


async def test_ready_once_it_consumes(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    async with proxied(broker) as (proxy, far):
        proxy.hold(Way.DOWN)
        async with serving(Consumer(queue.name, [count], inbox=inbox, broker=far)) as site:
            await eventually(lambda: proxy.connections == 1, "it knocks")
            unready, live = await site.get("/readyz"), await site.get("/livez")

            proxy.release(Way.DOWN)
            await eventually(site.is_ready, "ready")

    assert (unready.status, unready.body) == (503, "broker: not connected yet\n")
    assert (live.status, live.body) == (200, "ok\n")


async def test_a_lost_broker_makes_it_unready_and_not_dead(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    async with (
        proxied(broker) as (proxy, far),
        serving(Consumer(queue.name, [count], inbox=inbox, broker=far, work=WorkPolicy(backoff=QUICK))) as site,
    ):
        await eventually(site.is_ready, "ready")

        await assert_unready_while_refused(site, proxy, "broker: ")


async def test_a_broker_that_is_lost_makes_it_unready_while_the_last_handlers_end(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    hanging = Hanging()
    await queue.send(1)
    async with proxied(broker) as (proxy, far):
        consumer = Consumer(
            queue.name, [hanging.handle], inbox=inbox, broker=far, work=WorkPolicy(backoff=QUICK, drain_timeout=600)
        )
        async with serving(consumer) as site:
            await eventually(lambda: consumer.counters.in_flight == 1, "a handler runs")
            proxy.cut()
            await eventually(lambda: site.is_unready("broker: "), "unready")
            hanging.let_go.set()
            await eventually(site.is_ready, "ready again")


async def test_a_queue_that_was_deleted_makes_it_unready(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    async with serving(
        Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
    ) as site:
        await eventually(site.is_ready, "ready")

        await queue.channel.queue_delete(queue.name)
        await eventually(lambda: site.is_unready("broker: its queue does not exist"), "unready")

        await queue.declare()
        await eventually(site.is_ready, "ready again")


async def test_a_mute_broker_makes_it_unready(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    async with (
        proxied(broker, heartbeat=1) as (proxy, far),
        serving(Consumer(queue.name, [count], inbox=inbox, broker=far, work=WorkPolicy(backoff=QUICK))) as site,
    ):
        await eventually(site.is_ready, "ready")

        proxy.hold(Way.DOWN)
        await eventually(lambda: site.is_unready("broker: nothing has come from it for 1.5 s"), "unready")

        proxy.release(Way.DOWN)
        await eventually(site.is_ready, "ready again")


@ORDERS
async def test_a_lost_database_makes_an_idle_consumer_unready(
    order: Any, queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    async with proxied(inbox.database) as (proxy, far):
        consumer = Consumer(
            queue.name,
            [count],
            inbox=Inbox(far, "projection"),
            broker=broker,
            failures=FailurePolicy(order=order),
            work=WorkPolicy(backoff=QUICK),
        )
        async with serving(consumer) as site:
            await eventually(site.is_ready, "ready")

            await assert_unready_while_refused(site, proxy, "database: ")


@ORDERS
async def test_a_silent_database_makes_an_idle_consumer_unready(
    order: Any, queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    async with proxied(inbox.database) as (proxy, far):
        consumer = Consumer(
            queue.name,
            [count],
            inbox=Inbox(far, "projection"),
            broker=broker,
            failures=FailurePolicy(order=order),
            work=WorkPolicy(stall_after=0.3),
        )
        async with serving(consumer) as site:
            await eventually(site.is_ready, "ready")

            proxy.hold(Way.DOWN)
            await eventually(lambda: site.is_unready("database: it has not answered for "), "unready")

            proxy.release(Way.DOWN)
            await eventually(site.is_ready, "ready again")


async def test_a_handler_that_hangs_is_a_stall(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    hanging = Hanging()
    consumer = Consumer(
        queue.name,
        [hanging.handle],
        inbox=inbox,
        broker=broker,
        work=WorkPolicy(concurrency=2, stall_after=0.2, drain_timeout=600),
    )
    async with serving(consumer) as site:
        await eventually(site.is_ready, "ready")
        for number, key in enumerate("abc"):
            await queue.send(number, key=key)

        await eventually(lambda: site.is_unready("delivery: nothing has settled for "), "unready")
        assert await site.value("outbox_consumer_stalled", consumer="projection", queue=queue.name) == 1

        hanging.let_go.set()
        await eventually(lambda: consumer.counters.acknowledged == 3, "all three are settled")
        await eventually(site.is_ready, "ready again")
        assert await site.value("outbox_consumer_stalled", consumer="projection", queue=queue.name) == 0


async def test_a_held_message_whose_handler_hangs_is_a_stall_too(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    hanging, failures = Hanging(), [RuntimeError("not today")]

    @on("Counted")
    async def fail_then_hang(message: Message, connection: psycopg.AsyncConnection) -> None:
        if failures:
            raise failures.pop()
        await hanging.handle(message, connection)

    await queue.send(1)
    consumer = Consumer(
        queue.name,
        [fail_then_hang],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(retries=SEVERAL_MINUTES),
        work=WorkPolicy(stall_after=0.2),
    )
    async with serving(consumer) as site:
        await eventually(lambda: consumer.counters.held == 1, "it is held")
        await eventually(lambda: consumer.counters.unacknowledged == 0, "and acknowledged")
        await table.make_due()

        await eventually(lambda: site.is_unready("delivery: nothing has settled for "), "unready")

        hanging.let_go.set()
        await eventually(site.is_ready, "ready again")


async def test_a_dead_letter_that_is_refused_is_a_stall_once_nothing_else_settles(
    queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    consumer = Consumer(
        queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK, stall_after=0.2)
    )
    async with serving(consumer) as site:
        await eventually(site.is_ready, "ready")
        await queue.channel.queue_delete("billing.dead")

        await queue.send(1, event_type="Unknown")
        await eventually(lambda: site.is_unready("delivery: nothing has settled for "), "unready")

        await queue.channel.declare_queue("billing.dead", durable=True)
        await eventually(site.is_ready, "ready again")


async def test_a_long_idle_is_fine(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was settled last was settled long ago, several times `stall_after`."""
    monkeypatch.setattr(hindrances, "STALL_LOOK", 0.01)
    looks = 0
    await queue.send(1)
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(stall_after=0.2))
    async with serving(consumer) as site:
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is settled")
        await eventually(site.is_ready, "ready")

        async def has_idled() -> bool:
            nonlocal looks
            looks += 1
            assert "delivery: " not in (await site.get("/readyz")).body
            return looks > 100

        await eventually(has_idled, "a hundred looks, of at least a second")


async def test_an_overload_makes_it_unready_and_is_no_stall(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    stumbling = Stumbling({1: 1_000_000}, Overload("429 from the tax office"))
    consumer = Consumer(
        queue.name, [stumbling.handle], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK, stall_after=0.2)
    )
    async with serving(consumer) as site:
        await queue.send(1)

        # Longer than `stall_after`.
        await eventually(lambda: site.is_unready("overload: paused for 1 s"), "unready")
        answer = await site.get("/readyz")
        assert "tax office" not in answer.body  # its words are for the log
        assert "delivery" not in answer.body

        stumbling.failures.clear()
        await eventually(site.is_ready, "ready again")


async def test_unready_while_it_drains(queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings) -> None:
    hanging = Hanging()
    await queue.send(1)
    consumer = Consumer(queue.name, [hanging.handle], inbox=inbox, broker=broker, work=WorkPolicy(drain_timeout=600))
    async with serving(consumer) as site:
        await eventually(lambda: consumer.counters.in_flight == 1, "a handler runs")
        assert await site.is_ready()

        consumer.stop()
        draining, live = await site.get("/readyz"), await site.get("/livez")
        hanging.let_go.set()
        await eventually(lambda: consumer.counters.applied == 1, "the handler has ended")

    assert (draining.status, draining.body) == (503, "consumer: draining: it was told to stop\n")
    assert live.status == 200


async def test_a_loop_that_hangs_is_not_live(
    queue: Queue, inbox: Inbox, broker: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "LOOP_ANSWERS_WITHIN", 0.5)
    answers: list[Answer] = []
    async with serving(Consumer(queue.name, [count], inbox=inbox, broker=broker)) as site:
        await eventually(site.is_ready, "ready")
        asking = threading.Thread(target=lambda: answers.extend(map(site.ask, ("/livez", "/readyz", "/metrics"))))
        asking.start()

        asking.join(30)  # which is what hangs

        monkeypatch.setattr(served, "LOOP_ANSWERS_WITHIN", 20.0)
        assert (await site.get("/livez")).status == 200
    assert [answer.status for answer in answers] == [503, 503, 503]


async def test_without_an_address_nobody_is_answered(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)

    threads = set(threading.enumerate())
    async with answering_for(consumer, ""), running(consumer):
        assert "http" not in {thread.name for thread in set(threading.enumerate()) - threads}
