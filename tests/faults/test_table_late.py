"""Writers that commit long after they took their ids, while thousands of other rows have come and gone."""

import psycopg

from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.engine.follower import insert
from tests.support.eventually import eventually

CROWDS, CROWD = 3, 2000  # more ids than the tail looks back at each read


async def come_and_go(outbox: Outbox) -> None:
    for _ in range(CROWDS):
        await outbox.insert_many(CROWD)
        await eventually(outbox.is_empty, "the others are sent")


async def arrives_last(outbox: Outbox, queue: Reader, late: list[int]) -> None:
    await eventually(outbox.is_empty, "the late rows are sent")
    delivered = await queue.ids(CROWDS * CROWD + len(late))
    assert delivered[-len(late) :] == late


async def test_a_writer_that_commits_very_late_is_delivered_once_and_in_order(
    outbox: Outbox, writer: psycopg.AsyncConnection, queue: Reader, run_node: RunNode
) -> None:
    """A writer commits long after it took its ids; its rows arrive once, in order, without a sweep."""
    async with run_node(**NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        late = [await insert(writer, "slow customer") for _ in range(5)]
        await come_and_go(outbox)

        await writer.commit()

        await arrives_last(outbox, queue, late)


async def test_a_writer_that_began_before_the_relay_did_is_delivered(
    outbox: Outbox, writer: psycopg.AsyncConnection, queue: Reader, run_node: RunNode
) -> None:
    """A writer began before the relay started, and commits late; its rows arrive without a sweep."""
    late = [await insert(writer, "slow customer") for _ in range(5)]
    async with run_node(**NO_SWEEP):
        await come_and_go(outbox)

        await writer.commit()

        await arrives_last(outbox, queue, late)


async def test_an_id_taken_before_the_transaction_id_is_found_by_the_sweep(
    outbox: Outbox, writer: psycopg.AsyncConnection, queue: Reader, run_node: RunNode
) -> None:
    """A writer takes an id before it has a transaction id, which no snapshot shows; the sweep finds its row."""
    async with run_node(sweep_interval=0.5) as node:
        await eventually(node.is_ready, "ready")
        await outbox.insert_many(1)
        cursor = await writer.execute("SELECT nextval('outbox.message_id_seq'), pg_current_xact_id_if_assigned()")
        id_, transaction = await cursor.fetchone() or (0, "")
        assert transaction is None
        await come_and_go(outbox)

        await writer.execute(
            "INSERT INTO outbox.message (id, aggregate_type, aggregate_id, event_type, payload)"
            " VALUES (%s, 'customer', 'slow customer', 'InvoiceIssued', '{}')",
            [id_],
        )
        await writer.commit()

        await eventually(outbox.is_empty, "the late row is sent")
        assert (await queue.ids(1 + CROWDS * CROWD + 1))[-1] == id_
