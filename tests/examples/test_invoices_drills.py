"""examples/invoices for longer: a restart of the broker, a slow downstream, a lost database, a storm of repeats."""

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import LiteralString

import pytest

from examples.invoices.worker import QUEUE
from relay.testing.servers.process import resident_bytes
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import RunNode
from tests.examples.invoices import DEAD, REMEMBERED, SENT, WORKED_ON, InvoiceExample, proxy_to
from tests.faults.victim import Victim
from tests.support.eventually import eventually

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]

OUTAGE = 20.0  # seconds
SLOW = 5.0  # seconds that an invoice takes
MIB = 1024 * 1024

SEND_AGAIN = """
    INSERT INTO outbox.message (message_id, created_at, aggregate_type, aggregate_id, event_type, payload)
    SELECT message_id, created_at, aggregate_type, aggregate_id, event_type, payload
    FROM outbox.message WHERE state = 'sent'
"""


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitServer]:
    """A broker that the test may restart."""
    with RabbitServer(schedulers=1) as node:
        yield node


async def test_a_restart_of_the_broker_redelivers_what_was_unacknowledged(
    example: InvoiceExample, rabbitmq: RabbitServer, run_node: RunNode
) -> None:
    """The broker restarts with a hundred messages unacknowledged; they come again, and each takes effect once."""
    async with run_node():
        await example.issue()  # of a hundred customers: none waits for another
        await eventually(lambda: has(example, SENT, 100), "all are in the queue")
    await example.slow_down(30)  # longer than it takes to open a hundred connections
    worker = example.hire(concurrency=100)
    await worker.start()
    await eventually(lambda: has(example, WORKED_ON, 100), "a hundred are worked on")
    assert example.unacknowledged() == 100
    await example.speed_up()

    rabbitmq.stop()
    rabbitmq.launch()
    await asyncio.to_thread(rabbitmq.await_up)
    async with run_node():
        await example.issue(2)
        await eventually(example.is_settled, "all are projected")
    await eventually(example.is_drained, "none is left")
    worker.stop(signal.SIGTERM)

    assert await example.is_settled()
    assert await example.ready(DEAD) == 0
    counters = example.counters()
    losses = len(example.events("consumer.ready")) - 1
    assert losses > 0
    assert example.events("broker.degraded")
    assert 300 < counters["deliveries"] <= 300 + 100 * losses
    assert (counters["applied"], counters["failed"]) == (300, 0)


async def test_a_slow_downstream_throttles_the_producer_and_is_caught_up_with(
    example: InvoiceExample, rabbitmq: RabbitServer, run_node: RunNode
) -> None:
    """A slow worker fills its queue; the relay waits, memory stays bounded, and each invoice is projected once."""
    rabbitmq.ctl("set_policy", "-p", example.vhost, "full", f"^{QUEUE}$", '{"max-length": 50}', "--apply-to", "queues")
    await example.slow_down(SLOW)
    worker = example.hire()
    await worker.start()
    async with run_node():
        await example.issue(10)
        await eventually(lambda: has(example, REMEMBERED, 4), "the first are applied")
        before = resident_bytes(worker.pid)
        held = set()
        while await example.count(REMEMBERED) < 16:
            held.add(example.unacknowledged())
            assert await example.ready() < 400  # far from a thousand, though the limit is not exact
            await asyncio.sleep(0.1)
        assert max(held) == 4
        assert await example.count(SENT) < 500
        assert resident_bytes(worker.pid) - before < 8 * MIB

        await example.speed_up()
        await eventually(example.is_settled, "all are projected")
    await eventually(example.is_drained, "none is left")
    worker.stop(signal.SIGTERM)

    assert await example.is_settled()
    counters = example.counters()
    assert (counters["applied"], counters["redeliveries"], counters["failed"]) == (1000, 0, 0)
    assert await example.ready(DEAD) == 0


async def test_a_lost_database_is_waited_for_and_nothing_is_given_up(
    example: InvoiceExample, run_node: RunNode
) -> None:
    """The database is unreachable for 20 s; the worker waits, and then projects each invoice at its first delivery."""
    async with proxy_to(example.settings.database.url, amqp=False) as proxy, run_node():
        worker = example.hire(database=proxy)
        await example.slow_down(0.1)
        await worker.start()
        await example.issue(3)
        await eventually(lambda: has(example, REMEMBERED, 20), "it is at work")

        proxy.refusing = True
        proxy.cut()
        await asyncio.sleep(OUTAGE)
        assert worker.is_running()
        assert "database" in (await example.site.get("/readyz")).body
        assert example.unacknowledged() == 4
        assert await example.ready(DEAD) == 0
        reasons = [event["reason"] for event in example.events("database.degraded")]
        assert reasons
        assert len(set(reasons)) == len(reasons)
        proxy.refusing = False

        await eventually(example.is_settled, "all are projected")
        await eventually(example.is_drained, "none is left")
        worker.stop(signal.SIGTERM)

    assert len(example.events("database.healed")) == 1
    assert await example.is_settled()
    counters = example.counters()
    assert (counters["deliveries"], counters["redeliveries"]) == (300, 0)
    assert (counters["failed"], counters["retried"], counters["dead_letters"]) == (0, {}, {})


async def test_a_storm_of_repeats_is_absorbed(example: InvoiceExample, run_node: RunNode) -> None:
    """Ten thousand messages arrive a second time; the inbox recognises each of them, and no effect is doubled."""
    worker = example.hire()
    async with run_node():
        await example.issue(100)
        await eventually(lambda: has(example, SENT, 10_000), "all are in the queue")
    first = await seconds_to_drain(example, worker)
    assert await example.is_settled()

    async with run_node():
        await example.connection.execute(SEND_AGAIN)
        await eventually(lambda: has(example, SENT, 20_000), "all are in the queue again")
    again = await seconds_to_drain(example, worker)

    print(f"10,000 invoices: {10_000 / first:,.0f} a second; their repeats: {10_000 / again:,.0f} a second")
    assert await example.is_settled()
    counters = example.counters()
    assert (counters["applied"], counters["duplicates"], counters["failed"]) == (0, 10_000, 0)
    assert await example.ready(DEAD) == 0


async def has(example: InvoiceExample, statement: LiteralString, count: int) -> bool:
    return await example.count(statement) >= count


async def seconds_to_drain(example: InvoiceExample, worker: Victim) -> float:
    """Return the seconds that a worker takes to empty the queue."""
    await worker.start()
    begun_at = time.monotonic()
    await eventually(example.is_drained, "the queue is empty", 120)
    seconds = time.monotonic() - begun_at
    worker.stop(signal.SIGTERM)
    return seconds
