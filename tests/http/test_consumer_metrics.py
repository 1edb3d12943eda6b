"""What `/metrics` of a consumer serves is what docs/metrics.md says, and moves when the thing happens."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relay import __version__
from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Overload, Permanent, Retries, WorkPolicy
from relay.consume.queue_depth import ready_count
from relay.probes import cached_answer
from relay.servers.rabbitmq.connection import connect, open_channel
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import CONSUMER, QUEUE, Queue, Stumbling, Table, count
from tests.consume.policies import QUICK, SEVERAL_MINUTES
from tests.http.consumers import ORDERS, Hanging, inbox, queue, serving, table
from tests.http.metrics import documented, served
from tests.http.site import Sample, Site
from tests.support.eventually import eventually

__all__ = ["inbox", "queue", "table"]

TWICE = Retries(attempts=2, initial=0.05, maximum=0.05)


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_answer, "FRESH_FOR", 0.0)
    monkeypatch.setattr(cached_answer, "SHARE", 0)


def of(metrics: Mapping[Sample, float], name: str, **labels: str) -> float | None:
    """Return the value of a consumer's metric."""
    told = {"consumer": CONSUMER, "queue": QUEUE, **labels}
    return metrics.get((f"outbox_consumer_{name}", tuple(sorted(told.items()))))


async def test_the_documented_list_is_what_is_served(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(1, timestamp=datetime.now(UTC))
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with serving(consumer) as site:
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

        own = {(name, kind) for name, kind in await served(site) if name.startswith("outbox_consumer_")}
        assert own == documented("A consumer")
        assert await served(site) - own == {
            (name, kind)
            for name, kind in documented("Metrics")
            if name == "outbox_build_info" or name.startswith("process_")
        }
        assert await site.value("outbox_build_info", version=__version__) == 1


async def test_messages_are_counted_by_what_became_of_them(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    first = await queue.send(1, timestamp=datetime.now(UTC) - timedelta(hours=2))
    await queue.send(1, message_id=first, timestamp=datetime.now(UTC) - timedelta(hours=2))
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with serving(consumer) as site:
        await eventually(lambda: consumer.counters.acknowledged == 2, "both are settled")
        metrics = await site.metrics()

    assert (of(metrics, "deliveries_total"), of(metrics, "redeliveries_total")) == (2, 0)
    assert (of(metrics, "applied_total"), of(metrics, "duplicates_total")) == (1, 1)
    assert (of(metrics, "acknowledged_total"), of(metrics, "unacknowledged_messages")) == (2, 0)
    assert of(metrics, "process_duration_seconds_count") == 2
    assert of(metrics, "process_duration_seconds_bucket", le="60.0") == 2
    assert 7200 <= (of(metrics, "last_applied_age_seconds") or 0) < 7500
    assert (of(metrics, "ready"), of(metrics, "stalled"), of(metrics, "paused")) == (1, 0, 0)


async def test_what_is_in_hand_and_what_waits_is_told_apart(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    hanging = Hanging()
    for number in range(10):
        await queue.send(number, key=str(number))
    consumer = Consumer(
        queue.name, [hanging.handle], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=2, batch_size=2)
    )
    async with serving(consumer) as site:
        await eventually(lambda: consumer.counters.in_flight > 0, "handlers run")
        await eventually(lambda: is_told(site, 6, "queue_ready_messages"), "six wait")
        metrics = await site.metrics()
        hanging.let_go.set()
        await eventually(lambda: is_told(site, 0, "queue_ready_messages"), "none waits")

    assert of(metrics, "unacknowledged_messages") == consumer.prefetch == 4
    assert of(metrics, "handlers_in_flight") in (1, 2)  # all four keys may be one worker's
    assert of(metrics, "last_applied_age_seconds") is None  # nothing was applied so far


@ORDERS
async def test_retries_are_counted_by_step_and_dead_letters_by_reason(
    order: Any, queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    stumbling = Stumbling({1: 2})
    await queue.send(1)
    consumer = Consumer(
        queue.name, [stumbling.handle], inbox=inbox, broker=broker, failures=FailurePolicy(order=order, retries=TWICE)
    )
    async with serving(consumer) as site:
        await eventually(site.is_ready, "ready")
        assert of(await site.metrics(), "retries_total", step="0.05") is not None  # before the first
        await eventually(lambda: is_told(site, 1, "dead_letters_total", reason="exhausted"), "it is given up")
        metrics = await site.metrics()

    assert of(metrics, "failures_total") == 2
    assert of(metrics, "retries_total", step="0.05") == 1
    assert of(metrics, "dead_letters_total", reason="permanent") == 0


async def test_held_messages_are_told_until_they_are_applied(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    stumbling = Stumbling({0: 1})
    await queue.send_all(range(3))
    consumer = Consumer(
        queue.name, [stumbling.handle], inbox=inbox, broker=broker, failures=FailurePolicy(retries=SEVERAL_MINUTES)
    )
    async with serving(consumer) as site:
        await eventually(lambda: is_told(site, 3, "held_messages"), "one is held, and two behind it")
        await table.make_due()
        await eventually(lambda: is_told(site, 0, "held_messages"), "all are applied")


async def test_a_dead_letter_is_counted_though_nothing_was_tried_again(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    stumbling = Stumbling({1: 1}, Permanent("cancelled"))
    await queue.send(1)
    await queue.send(2, event_type="Unknown")
    consumer = Consumer(
        queue.name, [stumbling.handle], inbox=inbox, broker=broker, failures=FailurePolicy(order="skip")
    )
    async with serving(consumer) as site:
        await eventually(lambda: is_told(site, 1, "dead_letters_total", reason="permanent"), "the one")
        await eventually(lambda: is_told(site, 1, "dead_letters_total", reason="unhandled"), "the other")
        assert of(await site.metrics(), "dead_letters_total", reason="exhausted") == 0


async def test_a_pause_is_told_while_it_lasts_and_its_seconds_grow(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    stumbling = Stumbling({1: 1_000_000}, Overload("429"))
    await queue.send(1)
    consumer = Consumer(queue.name, [stumbling.handle], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
    async with serving(consumer) as site:
        await eventually(lambda: is_told(site, 1, "paused"), "it pauses")
        seconds = of(await site.metrics(), "paused_seconds_total") or 0.0

        async def more() -> bool:
            return (of(await site.metrics(), "paused_seconds_total") or 0.0) > seconds

        await eventually(more, "also between two probes")
        assert (of(await site.metrics(), "overloads_total") or 0) >= 1
        stumbling.failures.clear()
        await eventually(lambda: is_told(site, 0, "paused"), "it goes on")


async def test_lost_connections_are_counted_by_end_and_reason_and_what_they_took_back(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, rabbitmq: RabbitServer
) -> None:
    hanging = Hanging()
    await queue.send(1)
    consumer = Consumer(
        queue.name,
        [hanging.handle],
        inbox=inbox,
        broker=broker,
        work=WorkPolicy(backoff=QUICK, concurrency=1, drain_timeout=0.1),
    )
    async with serving(consumer) as site:
        await eventually(lambda: consumer.counters.in_flight == 1, "a handler runs")
        before = await site.metrics()
        name = broker.url.get_secret_value().rpartition("/")[2]
        rabbitmq.ctl("close_all_connections", "--vhost", name, "the drill")
        await eventually(lambda: is_told(site, 1, "reconnects_total", end="broker", reason="connection_forced"), "one")
        await eventually(lambda: is_told(site, 1, "redeliveries_total"), "it came again")
        assert of(await site.metrics(), "given_back_total") == 1

        await eventually(lambda: hanging.begun == 2, "a handler holds the session that is ended")
        await table.end_sessions()
        hanging.let_go.set()
        await eventually(lambda: is_told(site, 1, "applied_total"), "it is applied")
        metrics = await site.metrics()

    assert of(before, "reconnects_total", end="broker", reason="lost") == 0
    assert of(before, "reconnects_total", end="database", reason="lost") == 0
    # Whether the server's own word is read depends on what the handler was at.
    words = ("admin_shutdown", "lost")
    assert sum(of(metrics, "reconnects_total", end="database", reason=word) or 0 for word in words) >= 1


async def test_counting_a_queue_that_is_not_there_disturbs_nothing(queue: Queue, broker: BrokerSettings) -> None:
    connection = await connect(broker, "test")
    channel = await open_channel(connection)

    assert await ready_count(connection, "nowhere", 5.0) is None
    assert await ready_count(connection, QUEUE, 5.0) == 0

    assert not channel.is_closed
    await connection.hang_up()
    assert await ready_count(connection, QUEUE, 5.0) is None


async def is_told(site: Site, number: float, name: str, **labels: str) -> bool:
    return of(await site.metrics(), name, **labels) == number
