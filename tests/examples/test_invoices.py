"""examples/invoices: whatever fails on the way, each invoice is projected once, and what failed is seen."""

import asyncio
import signal

import pytest
from pamqp.commands import Basic

from tests.engine.conftest import RunNode
from tests.examples.invoices import DEAD, DIFFERENT, REMEMBERED, SENT, UNSENT, WORKED_ON, InvoiceExample, proxy_to
from tests.faults.hosts import to_hosts
from tests.support.eventually import eventually
from tests.support.proxy import Act, Way

POISON_LIMIT = 5  # the consumer's own


async def test_a_producer_that_sends_again_since_no_confirm_came_has_one_effect(
    example: InvoiceExample, run_node: RunNode
) -> None:
    worker = example.hire()
    await worker.start()
    async with proxy_to(example.settings.broker.url, amqp=True) as proxy:
        proxy.on_frame(Way.DOWN, Basic.Ack, 1, Act.HOLD)
        async with run_node(to_hosts(example.settings, proxy)):
            await example.issue()
            await eventually(example.is_settled, "the broker has them, and the worker its own")
            assert proxy.fired.is_set()
            assert await example.count(SENT) == 0  # as far as the relay knows

            proxy.cut()
            proxy.release(Way.DOWN)
            await eventually(lambda: has_none(example), "the relay has sent them again, and knows it")
            await eventually(example.is_drained, "the worker has had them all")
    worker.stop(signal.SIGTERM)

    assert await example.is_settled()
    counters = example.counters()
    assert (counters["applied"], counters["duplicates"]) == (100, 100)
    assert (counters["failed"], counters["acknowledged"]) == (0, 200)
    assert await example.ready(DEAD) == 0


async def test_a_worker_that_dies_between_commit_and_acknowledgement_has_one_effect(
    example: InvoiceExample, run_node: RunNode
) -> None:
    async with run_node():
        await example.issue()
        await eventually(lambda: has_none(example), "all are in the queue")
    async with proxy_to(example.settings.broker.url, amqp=True) as proxy:
        proxy.on_frame(Way.UP, Basic.Ack, 1, Act.HOLD)
        worker = example.hire(broker=proxy)
        await worker.start()
        await asyncio.wait_for(proxy.fired.wait(), 20)
        await eventually(lambda: has_remembered(example, 4), "all that it may hold is committed")
        worker.stop(signal.SIGKILL)
        proxy.cut()
        proxy.release(Way.UP)

        await worker.start()
        await eventually(example.is_settled, "all are projected")
        await eventually(example.is_drained, "none is left")
        worker.stop(signal.SIGTERM)

    assert await example.is_settled()
    counters = example.counters()
    assert (counters["redeliveries"], counters["duplicates"], counters["applied"]) == (4, 4, 96)
    assert (counters["failed"], counters["acknowledged"]) == (0, 100)
    assert await example.ready(DEAD) == 0


async def test_an_invalid_payload_is_a_dead_letter_at_once_and_the_others_are_projected(
    example: InvoiceExample, run_node: RunNode
) -> None:
    worker = example.hire()
    await worker.start()
    async with run_node():
        await example.connection.execute("""
            INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
            VALUES ('customer', 'customer-1', 'InvoiceIssued', '{"invoice_id": "1", "quantity": 0}')
        """)
        await example.issue()
        await eventually(example.is_settled, "the others are projected")
    await eventually(lambda: has_dead(example), "it is a dead letter")
    assert await example.metric("dead_letters_total", reason="invalid") == 1  # OutboxConsumerDeadLetters
    worker.stop(signal.SIGTERM)

    letter = await example.dead_letter()
    assert (letter.headers["x-dead-reason"], letter.headers["x-dead-attempts"]) == ("invalid", 1)
    assert "quantity: greater_than" in str(letter.headers["x-exception-message"])
    (event,) = example.events("message.dead")
    assert (event["level"], event["queue"], event["reason"], event["attempts"]) == ("error", DEAD, "invalid", 1)
    counters = example.counters()
    assert (counters["dead_letters"], counters["failed"], counters["deliveries"]) == ({"invalid": 1}, 1, 101)


@pytest.mark.drills
async def test_a_payload_that_kills_is_a_dead_letter_and_its_neighbours_are_projected(
    example: InvoiceExample, run_node: RunNode
) -> None:
    """The worker is killed whenever it works on one invoice; that becomes a dead letter, the others are projected."""
    async with run_node():
        await example.issue()
        await eventually(lambda: has_none(example), "all are in the queue")
    await example.slow_down(600, await example.some_invoice())
    worker = example.hire()
    deaths = 0

    async def is_over() -> bool:
        return await has_dead(example) or not await is_nobody_at_it(example)

    while True:
        await worker.start()
        await eventually(is_over, "it works on the poison, or has given it up")
        if await has_dead(example):
            break
        worker.stop(signal.SIGKILL)
        deaths += 1
        await eventually(lambda: is_nobody_at_it(example), "the database has noticed")
    await eventually(example.is_drained, "the others are projected")
    assert await example.metric("dead_letters_total", reason="poisoned") == 1
    worker.stop(signal.SIGTERM)

    assert 0 < deaths <= POISON_LIMIT
    assert await example.count(DIFFERENT) == 1
    assert await example.count(REMEMBERED) == 99
    letter = await example.dead_letter()
    assert letter.headers["x-dead-reason"] == "poisoned"
    assert [event["reason"] for event in example.events("message.dead")] == ["poisoned"]
    assert example.counters()["dead_letters"] == {"poisoned": 1}


async def has_none(example: InvoiceExample) -> bool:
    return await example.count(UNSENT) == 0


async def has_dead(example: InvoiceExample) -> bool:
    return await example.ready(DEAD) == 1


async def has_remembered(example: InvoiceExample, count: int) -> bool:
    return await example.count(REMEMBERED) == count


async def is_nobody_at_it(example: InvoiceExample) -> bool:
    return await example.count(WORKED_ON) == 0
