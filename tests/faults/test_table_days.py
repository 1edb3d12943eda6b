"""A day's partition is missing, or a session locks the sent rows: confirmed rows are marked later, and sent once."""

import psycopg
from structlog.testing import capture_logs

from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.faults.blockers import is_named
from tests.support.eventually import eventually

WINDOW = 200

DROP_DAYS = """
    DO $$ DECLARE day regclass; BEGIN
        FOR day IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'outbox.message_sent'::regclass LOOP
            EXECUTE format('DROP TABLE %s', day);
        END LOOP;
    END $$
"""
DROP_LAST_DAY = """
    DO $$ BEGIN EXECUTE (
        SELECT format('DROP TABLE %s', max(inhrelid::regclass::text))
        FROM pg_inherits WHERE inhparent = 'outbox.message_sent'::regclass);
    END $$
"""
LOCK = "LOCK TABLE outbox.message_sent IN {} MODE"


async def test_a_missing_day_is_made_when_the_clock_reaches_it(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """The partition of the day is missing, as after a clock step; the relay makes it, and marks the row."""
    async with run_node() as node:
        await eventually(node.is_ready, "ready")
        await outbox.insert_many(10)
        await eventually(outbox.is_empty, "all is marked")
        await outbox.connection.execute(DROP_DAYS)

        id_ = await outbox.insert()
        await eventually(outbox.is_empty, "marked")

    assert await outbox.ids("sent") == [id_]
    await queue.drain(11)


async def test_a_lock_that_prevents_a_new_day_delays_marks_and_repeats_nothing(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """A lock keeps the relay from making the day; it names the session, marks later, and repeats nothing."""
    await outbox.connection.execute(DROP_DAYS)
    await writer.execute(LOCK.format("SHARE UPDATE EXCLUSIVE").encode())
    await outbox.insert_many(3000)

    async with run_node(max_window_rows=WINDOW, **NO_SWEEP) as node:
        await is_named(writer, "has locked message_sent", node)
        await eventually(lambda: node.in_flight == 0, "all that was sent is confirmed")
        assert await outbox.ids("sent") == []
        await writer.commit()

        await eventually(outbox.is_empty, "everything is marked")
        await eventually(lambda: not node.hindrances(), "all is well again")

    assert await outbox.ids("sent") == sorted(await queue.ids(3000))


async def test_a_locked_table_of_sent_rows_delays_the_marks_and_repeats_nothing(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """The table of sent rows is locked; the relay bounds what it sends, marks later, and repeats nothing."""
    async with run_node(max_window_rows=WINDOW, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await writer.execute(LOCK.format("ACCESS EXCLUSIVE").encode())
        await outbox.insert_many(3000)

        await is_named(writer, "has locked message_sent", node)
        depth = (await queue.channel.declare_queue("events", passive=True)).declaration_result.message_count
        assert depth is not None
        assert depth <= WINDOW
        await writer.commit()

        await eventually(outbox.is_empty, "everything is marked")

    assert await outbox.ids("sent") == sorted(await queue.ids(3000))


async def test_a_relay_works_while_the_days_to_come_cannot_be_made(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """A lock keeps the relay from making future days; it logs the session, and delivers meanwhile."""
    await outbox.connection.execute(DROP_LAST_DAY)
    await writer.execute(LOCK.format("SHARE UPDATE EXCLUSIVE").encode())
    id_ = await outbox.insert()

    with capture_logs() as events:
        async with run_node() as node:
            assert await queue.ids(1) == [id_]
            await eventually(outbox.is_empty, "marked")
            assert not node.hindrances()

    (reason,) = [event["reason"] for event in events if event["event"] == "days.blocked"]
    assert f"session {writer.info.backend_pid} has locked message_sent" in reason
