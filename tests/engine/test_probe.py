"""One row at a time tries a route that does not work, on a separate channel."""

from relay.engine.row import Outcome
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually


async def test_only_one_row_at_a_time_tries_the_route(outbox: Outbox, run_node: RunNode) -> None:
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)"
        " SELECT 'customer', n::text, 'InvoiceIssued', '1', '', 'nowhere' FROM generate_series(1, 500) AS n"
    )

    async with run_node(max_in_flight=100) as node:
        await eventually(outbox.is_empty, "set aside")
        before = node.snapshot().failures[Outcome.RETURNED]
        await eventually(lambda: was_probed(outbox, 2), "tried twice more")
        after = node.snapshot().failures[Outcome.RETURNED]

    assert before < 500
    assert after - before <= 3


async def test_a_probe_that_closes_its_channel_disturbs_nobody(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    await outbox.insert("lost", exchange="missing")

    async with run_node() as node:
        await eventually(outbox.is_empty, "set aside")
        fine: list[int] = []
        while not await was_probed(outbox, 2):
            fine.append(await outbox.insert(f"fine-{len(fine)}"))
        messages = await queue.drain(len(fine))
        assert node.snapshot().failures[Outcome.UNKNOWN] == 0
        assert node.snapshot().broker_losses == {}

    assert not any("x-outbox-redelivered" in message.headers for message in messages)


async def was_probed(outbox: Outbox, times: int) -> bool:
    cursor = await outbox.connection.execute("SELECT probes FROM outbox.quarantine")
    row = await cursor.fetchone()
    return row is not None and int(row[0]) >= times
