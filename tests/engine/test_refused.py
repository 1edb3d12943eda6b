"""What the broker refuses is tried again, then parked with its words; what is delayed waits."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aio_pika
import pytest

from relay.settings import Wire
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually


@pytest.mark.parametrize("wire", Wire)
async def test_an_unroutable_row_burns_its_attempts_and_is_parked_with_the_reason(
    outbox: Outbox, queue: Reader, run_node: RunNode, wire: Wire
) -> None:
    lost = await outbox.insert("1", routing_key="nowhere", exchange="")
    fine = await outbox.insert("2")

    async with run_node(wire=wire, max_attempts=3):
        await eventually(lambda: is_parked(outbox, lost), "parked")
        assert await queue.ids(1) == [fine]

    assert await outbox.column("attempts", lost) == 3
    assert "312 NO_ROUTE" in await outbox.column("last_error", lost)


@pytest.mark.parametrize("wire", Wire)
async def test_a_missing_exchange_parks_its_own_rows_only(
    outbox: Outbox, queue: Reader, run_node: RunNode, wire: Wire
) -> None:
    lost = [await outbox.insert(f"lost-{n}", exchange="missing") for n in range(3)]
    fine = [await outbox.insert(f"fine-{n}") for n in range(20)]

    async with run_node(wire=wire, max_attempts=2):
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == lost
    assert await outbox.ids("sent") == fine
    assert "no exchange 'missing'" in await outbox.column("last_error", lost[0])
    assert await outbox.column("attempts", lost[0]) == 2
    # Neighbours in flight when the channel closed may go out twice, and say so.
    messages = [message async for message in taken(queue)]
    assert {int(str(m.headers["x-outbox-id"])) for m in messages} == set(fine)
    firsts = set()
    for message in messages:
        assert message.message_id not in firsts or message.headers.get("x-outbox-redelivered")
        firsts.add(message.message_id)


@pytest.mark.parametrize("wire", Wire)
async def test_what_is_too_large_is_parked_unsent(outbox: Outbox, queue: Reader, run_node: RunNode, wire: Wire) -> None:
    large = await outbox.insert("1", payload=json.dumps("x" * 5000))
    fine = await outbox.insert("2")

    async with run_node(wire=wire, max_attempts=1, max_message_bytes=4096):
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == [large]
    assert "max_message_bytes" in await outbox.column("last_error", large)
    assert await queue.ids(1) == [fine]


async def test_a_delayed_row_waits_and_holds_nobody(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    due_at = datetime.now(UTC) + timedelta(seconds=1.5)
    delayed = await outbox.insert("1", available_at=due_at)
    later = await outbox.insert("1")

    async with run_node():
        assert await queue.ids(1) == [later]
        assert await queue.ids(1) == [delayed]
        await eventually(outbox.is_empty, "marked")

    assert await outbox.column("sent_at", delayed) >= due_at


async def test_a_retry_takes_its_backoff_along_over_a_restart(
    outbox: Outbox, channel: aio_pika.abc.AbstractChannel, queue: Reader, run_node: RunNode
) -> None:
    first = await outbox.insert("1", exchange="", routing_key="later")
    second = await outbox.insert("1")
    async with run_node(backoff_initial=1.0, backoff_max=2.0):
        await eventually(lambda: attempts(outbox, first), "one attempt burnt")

    await channel.declare_queue("later", durable=True)
    async with run_node():
        await eventually(outbox.is_empty, "both sent")

    assert await outbox.column("sent_at", first) <= await outbox.column("sent_at", second)
    assert await outbox.column("attempts", first) >= 1


async def is_parked(outbox: Outbox, id_: int) -> bool:
    return id_ in await outbox.ids("parked")


async def attempts(outbox: Outbox, id_: int) -> bool:
    return bool(await outbox.column("attempts", id_))


async def taken(queue: Reader) -> AsyncIterator[aio_pika.abc.AbstractIncomingMessage]:
    while (message := await queue.queue.get(no_ack=True, fail=False)) is not None:
        yield message
