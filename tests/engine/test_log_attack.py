"""What may go wrong with rows of the log: ids that come again, segments that change under a session, long walks."""

import time
from typing import Any

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.engine.read import log_positions, positions
from relay.engine.row import Row
from tests.engine.conftest import Outbox
from tests.engine.test_log_moves import Reader, is_in, reading, value
from tests.support.log import ensure, use_log

in_log = pytest.mark.parametrize("storage", ["log"], indirect=True)
FAR = "SELECT setval('outbox.message_id_seq', (SELECT max(past) + 10 FROM outbox.segment))"


@in_log
@pytest.mark.parametrize("restart", [False, True], ids=["same session", "next session"])
async def test_rows_whose_ids_come_again_are_sent(
    database: DatabaseSettings, outbox: Outbox, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    async with reading(database) as reader:
        await outbox.insert_many(200)
        await reader.mark(await reader.read())
        await reader.read()
        await reader.checkpoints.note()
        await outbox.connection.execute("TRUNCATE outbox.message RESTART IDENTITY")
        await outbox.insert_many(100)
        if not restart:
            assert len(await everything(reader)) == 100
            return

    async with reading(database) as reader:
        assert len(await everything(reader)) == 100


async def everything(reader: Reader) -> list[Row]:
    rows = await reader.read()
    await reader.sweep()
    return rows + await reader.read()


@in_log
async def test_a_row_of_far_moves_also_when_far_has_become_a_segment(
    database: DatabaseSettings, database_url: str, outbox: Outbox
) -> None:
    async with reading(database) as reader:
        await reader.read()
        await outbox.connection.execute(FAR)
        id_ = await outbox.insert("1")
        rows: list[Row] = []
        while not rows:  # one segment a read
            rows = await reader.read()
        (row,) = rows
        assert await is_in(outbox, id_, "message_log_far")
        with psycopg.connect(database_url, autocommit=True) as other:
            assert "changed" in ensure(other, ids=1 << 20)

        reader.tail.leave([row])
        await reader.tail._tend_log()

        under_way = set(reader.tail._positions.under_way()) | set(reader.tail._positions.logged())
        assert id_ in under_way or await is_in(outbox, id_, "message_pending"), "nobody knows it any more"


@in_log
async def test_rows_of_a_backlog_stay_in_the_log_while_nothing_passes_them(
    database: DatabaseSettings, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "PASSED", 3000)
    async with reading(database) as reader:
        await outbox.insert_many(10_000)
        await reader.tail._next_rows()  # the segments, and the first lane
        while reader.tail._positions.has_room():
            await reader.tail._next_rows()

        reader.tail.checkpoints()

        assert len(reader.tail._passed) == 0, "a window that was read just now moves out of the log"


@in_log
async def test_followers_that_are_left_while_a_read_is_prepared_come_before_later_rows(
    database: DatabaseSettings, outbox: Outbox
) -> None:
    """The read may be retried for longer than the key waits: here it waits for no time."""
    async with reading(database) as reader:
        ids = [await outbox.insert("1"), await outbox.insert("1")]
        head, follower = await reader.read()
        await reader.tail._tend_log()

        await reader.marker._write_postponed(head, "refused", 0.0)
        reader.tail.back_off(head, time.monotonic(), [follower])
        ids.append(await outbox.insert("1"))
        came = await reader.tail._next_rows()
        came += await reader.read()

        assert [row.id for row in came] == ids


async def dropped_segment(database_url: str, outbox: Outbox, reader: Reader) -> int:
    """Fill two segments, and drop the first, as retention does; return an id that nobody has used."""
    unused: int = await value(outbox, "SELECT nextval('outbox.message_id_seq')")
    for _ in range(8):
        await outbox.insert_many(1100)
        await reader.mark(await reader.read())
    await outbox.connection.execute("UPDATE outbox.receipt SET sent_at = now() - interval '40 days'")
    with psycopg.connect(database_url, autocommit=True) as other:
        ensure(other, ahead=4)
        await reader.read()
        for _ in range(200):
            try:
                (kept_by,) = other.execute("SELECT kept_by FROM outbox.empty_segment(1, false, false)").fetchone() or (
                    "",
                )
                assert kept_by is None, kept_by
                break
            except psycopg.errors.LockNotAvailable:
                pass
        for _ in range(200):
            try:
                assert other.execute("SELECT outbox.drop_segment()").fetchone() == (1,)
                break
            except psycopg.errors.LockNotAvailable:
                pass
    return unused


async def test_a_transaction_older_than_a_dropped_segment_does_not_end_the_session(
    database: DatabaseSettings, database_url: str, outbox: Outbox, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    with psycopg.connect(database_url, autocommit=True) as other:
        use_log(other)
    async with reading(database) as reader:
        await reader.read()
        await outbox.insert_many(10)
        await reader.mark(await reader.read())
        await writer.execute("SELECT pg_current_xact_id()")  # business that has not come to its messages yet
        await outbox.insert_many(10)
        await reader.mark(await reader.read())
        await dropped_segment(database_url, outbox, reader)

        await writer.commit()

        id_ = await outbox.insert("1")
        assert [row.id for row in await reader.read()] == [id_]


async def test_the_sweep_finds_a_late_row_of_a_segment_that_was_dropped(
    database: DatabaseSettings, database_url: str, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    with psycopg.connect(database_url, autocommit=True) as other:
        use_log(other)
    async with reading(database) as reader:
        unused = await dropped_segment(database_url, outbox, reader)
        await outbox.insert("1", id=unused)
        assert await is_in(outbox, unused, "message_log_0")

        found = await everything(reader)
        for _ in range(2):
            await outbox.insert_many(10)
            found += await everything(reader)

        assert unused in {row.id for row in found}


async def test_a_session_without_a_checkpoint_does_not_walk_over_ids_that_have_no_row(
    database: DatabaseSettings, database_url: str, outbox: Outbox
) -> None:
    await outbox.connection.execute("SELECT setval('outbox.message_id_seq', 1000000000)")
    with psycopg.connect(database_url, autocommit=True) as other:
        use_log(other)
    async with reading(database) as reader:
        await outbox.insert_many(100)
        await reader.mark(await reader.read())
        assert await outbox.is_empty()

    async with reading(database) as reader:  # the one before it died before its first note
        id_ = await outbox.insert("1")
        for _ in range(200):
            await reader.write()
            if rows := await reader.tail._next_rows():
                assert [row.id for row in rows] == [id_]
                return
        pytest.fail("200 reads, and the row did not come")


@in_log
async def test_what_a_read_sends_to_the_server_does_not_grow_with_a_large_transaction(
    database: DatabaseSettings, outbox: Outbox, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    monkeypatch.setattr(log_positions, "SLICE", 1000)
    async with reading(database) as reader:
        await reader.read()
        await outbox.insert_many(100)
        await reader.mark(await reader.read())
        await writer.execute(
            "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
            " SELECT 'customer', (n % 100)::text, 'Issued', '1' FROM generate_series(1, 20000) AS n"
        )
        await outbox.insert_many(100)
        await reader.mark(await reader.read())
        await writer.commit()

        most = got = 0
        while got < 20_000:
            await reader.write()
            rows = await reader.tail._next_rows()
            got += len(rows)
            most = max(most, *(len(lane.taken) for lane in reader.tail._positions._log._lanes.values()))
            if rows:
                await reader.mark(rows)

        assert most < 1000, f"{most} ids of one lane go with each read, though all of them are marked"


@in_log
async def test_no_insert_fails_while_segments_cannot_be_made(database_url: str, outbox: Outbox, writer: Any) -> None:
    """A writer of no other right than INSERT and nextval can bring that about, with one transaction left open."""
    await outbox.insert("1")
    await writer.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'b', '1')"
    )
    await outbox.connection.execute(FAR)
    await outbox.insert("1")
    with psycopg.connect(database_url, autocommit=True) as other:
        assert ensure(other, ids=1 << 20, tries=20) == ["bounded", "read"]
    await outbox.connection.execute("SELECT setval('outbox.message_id_seq', 10000000000)")  # by nextval: an hour

    await outbox.insert("1")
