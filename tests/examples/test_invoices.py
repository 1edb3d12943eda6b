"""examples/invoices: whatever fails on the way, each invoice is projected once, and what failed is seen."""

import asyncio
import signal

from pamqp.commands import Basic

from tests.engine.conftest import RunNode
from tests.examples.invoices import DEAD, DIFFERENT, REMEMBERED, SENT, UNSENT, WORKED_ON, Stand, proxy_to
from tests.faults.hosts import to_hosts
from tests.support.eventually import eventually
from tests.support.proxy import Act, Way

POISON_LIMIT = 5  # the consumer's own


async def test_a_producer_that_sends_again_since_no_confirm_came_has_one_effect(
    stand: Stand, run_node: RunNode
) -> None:
    worker = stand.hire()
    await worker.start()
    async with proxy_to(stand.settings.broker.url, amqp=True) as proxy:
        proxy.on_frame(Way.DOWN, Basic.Ack, 1, Act.HOLD)
        async with run_node(to_hosts(stand.settings, proxy)):
            await stand.issue()
            await eventually(stand.is_settled, "the broker has them, and the worker its own")
            assert proxy.fired.is_set()
            assert await stand.count(SENT) == 0  # as far as the relay knows

            proxy.cut()
            proxy.release(Way.DOWN)
            await eventually(lambda: has_none(stand), "the relay has sent them again, and knows it")
            await eventually(stand.is_drained, "the worker has had them all")
    worker.stop(signal.SIGTERM)

    assert await stand.is_settled()
    counters = stand.counters()
    assert (counters["applied"], counters["duplicates"]) == (100, 100)
    assert (counters["failed"], counters["acknowledged"]) == (0, 200)
    assert await stand.ready(DEAD) == 0


async def test_a_worker_that_dies_between_commit_and_acknowledgement_has_one_effect(
    stand: Stand, run_node: RunNode
) -> None:
    async with run_node():
        await stand.issue()
        await eventually(lambda: has_none(stand), "all are in the queue")
    async with proxy_to(stand.settings.broker.url, amqp=True) as proxy:
        proxy.on_frame(Way.UP, Basic.Ack, 1, Act.HOLD)
        worker = stand.hire(broker=proxy)
        await worker.start()
        await asyncio.wait_for(proxy.fired.wait(), 20)
        await eventually(lambda: has_remembered(stand, 4), "all that it may hold is committed")
        worker.stop(signal.SIGKILL)
        proxy.cut()
        proxy.release(Way.UP)

        await worker.start()
        await eventually(stand.is_settled, "all are projected")
        await eventually(stand.is_drained, "none is left")
        worker.stop(signal.SIGTERM)

    assert await stand.is_settled()
    counters = stand.counters()
    assert (counters["redeliveries"], counters["duplicates"], counters["applied"]) == (4, 4, 96)
    assert (counters["failed"], counters["acknowledged"]) == (0, 100)
    assert await stand.ready(DEAD) == 0


async def test_an_invalid_payload_is_a_dead_letter_at_once_and_the_others_are_projected(
    stand: Stand, run_node: RunNode
) -> None:
    worker = stand.hire()
    await worker.start()
    async with run_node():
        await stand.connection.execute("""
            INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
            VALUES ('customer', 'customer-1', 'InvoiceIssued', '{"invoice_id": "1", "quantity": 0}')
        """)
        await stand.issue()
        await eventually(stand.is_settled, "the others are projected")
    await eventually(lambda: has_dead(stand), "it is a dead letter")
    assert await stand.metric("dead_letters_total", reason="invalid") == 1  # OutboxConsumerDeadLetters
    worker.stop(signal.SIGTERM)

    letter = await stand.dead_letter()
    assert (letter.headers["x-dead-reason"], letter.headers["x-dead-attempts"]) == ("invalid", 1)
    assert "quantity: greater_than" in str(letter.headers["x-exception-message"])
    (event,) = stand.events("message.dead")
    assert (event["level"], event["queue"], event["reason"], event["attempts"]) == ("error", DEAD, "invalid", 1)
    counters = stand.counters()
    assert (counters["dead_letters"], counters["failed"], counters["deliveries"]) == ({"invalid": 1}, 1, 101)


async def test_a_payload_that_kills_each_time_is_a_dead_letter_and_its_neighbours_are_projected(
    stand: Stand, run_node: RunNode
) -> None:
    """Killed as by the kernel for want of memory, whenever it works on that invoice."""
    async with run_node():
        await stand.issue()
        await eventually(lambda: has_none(stand), "all are in the queue")
    await stand.slow_down(600, await stand.some_invoice())
    worker = stand.hire()
    deaths = 0

    async def is_over() -> bool:
        return await has_dead(stand) or not await is_nobody_at_it(stand)

    while True:
        await worker.start()
        await eventually(is_over, "it works on the poison, or has given it up")
        if await has_dead(stand):
            break
        worker.stop(signal.SIGKILL)
        deaths += 1
        await eventually(lambda: is_nobody_at_it(stand), "the database has noticed")
    await eventually(stand.is_drained, "the others are projected")
    assert await stand.metric("dead_letters_total", reason="poisoned") == 1
    worker.stop(signal.SIGTERM)

    assert 0 < deaths <= POISON_LIMIT
    assert await stand.count(DIFFERENT) == 1
    assert await stand.count(REMEMBERED) == 99
    letter = await stand.dead_letter()
    assert letter.headers["x-dead-reason"] == "poisoned"
    assert [event["reason"] for event in stand.events("message.dead")] == ["poisoned"]
    assert stand.counters()["dead_letters"] == {"poisoned": 1}


async def has_none(stand: Stand) -> bool:
    return await stand.count(UNSENT) == 0


async def has_dead(stand: Stand) -> bool:
    return await stand.ready(DEAD) == 1


async def has_remembered(stand: Stand, count: int) -> bool:
    return await stand.count(REMEMBERED) == count


async def is_nobody_at_it(stand: Stand) -> bool:
    return await stand.count(WORKED_ON) == 0
