"""The tail gives every committed row once, soon, and in order per key, whatever the order of the commits."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import accumulate

import psycopg
import pytest

from relay.engine.read import positions, tail
from relay.engine.read.positions import Plan
from relay.engine.row import Row
from relay.engine.session.session import LANES
from relay.engine.settle.put_away import PutAway
from relay.engine.settle.quarantine_table import QuarantineTable
from tests.engine.conftest import Outbox
from tests.engine.follower import INSERT, Follow, insert, unhurried
from tests.support.eventually import eventually

BECOME_DUE = (
    "UPDATE outbox.message SET available_at = now() WHERE state = 'pending' AND available_at > now() AND lane <> %s"
)


async def test_a_row_that_commits_after_a_higher_id_is_read(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    follower = await follow()
    late = await insert(writer, "1")
    higher = await outbox.insert("1")
    await follower.has(higher)

    await writer.commit()

    await follower.has(late)
    assert follower.ids == [higher, late]


async def test_the_very_first_row_is_read(outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow) -> None:
    """A sequence that was never used says that it stands at 1."""
    follower = await follow()
    await asyncio.sleep(0.2)  # some reads, of which nothing can be seen, on the empty table
    first = await insert(writer, "1")
    await follower.has(await outbox.insert("1"))

    await writer.commit()

    await follower.has(first)


async def test_a_late_row_is_read_when_its_transaction_is_the_youngest_of_all(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    """A snapshot does not name running transactions that are younger than the last one that has ended."""
    follower = await follow()
    await follower.has(await outbox.insert("1"))
    late = [await insert(writer, "1")]
    for _ in range(10):
        await asyncio.sleep(0.05)  # far longer than a read looks back
        late.append(await insert(writer, "1"))

    await writer.commit()

    await follower.has(*late)


async def test_a_statement_that_changed_nothing_hides_no_late_row(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    """It took no transaction id, so the next snapshot need not name who had one before."""
    follower = await follow()
    await follower.has(await outbox.insert("1"))
    session = follower.tail._session
    retry = unhurried(session)
    table, written_at = QuarantineTable(session, retry, PutAway(session, follower.tail, retry)), session.written_at
    await eventually(lambda: session.written_at != written_at, "a real change, before which none of these rows is")
    late = [await insert(writer, "1")]
    for _ in range(10):
        await asyncio.sleep(0.05)
        await table.set_aside_behind(follower.rows[:1])
        late.append(await insert(writer, "1"))

    await writer.commit()

    await follower.has(*late)


async def test_a_row_of_a_savepoint_that_commits_late_is_read(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    follower = await follow()
    await insert(writer, "1")
    async with writer.transaction():
        late = await insert(writer, "1")
    await follower.has(await outbox.insert("1"))

    await writer.commit()

    await follower.has(late)


async def test_a_transaction_that_ran_long_is_read_when_it_ends_without_a_sweep(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    follower = await follow(max_window_rows=40_000)
    late = await insert(writer, "1")
    for turn in range(1, 5):  # far beyond what each read looks back
        await outbox.insert_many(3000)
        await follower.counts(3000 * turn)

    await writer.commit()

    await follower.has(late)
    assert follower.tail.sweep_finds == 0


async def test_a_long_transaction_that_ends_during_another_reread_needs_no_sweep(
    outbox: Outbox, database_url: str, writer: psycopg.AsyncConnection, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = await follow(max_window_rows=40_000)
    running, reread_from = follower.tail._positions._open, follower.tail._positions.reread_from
    with psycopg.connect(database_url) as first:  # plain: it commits within a call
        (id_, xid) = first.execute(f"{INSERT}, pg_current_xact_id()::text::bigint", ["1"]).fetchone() or (0, 0)
        await eventually(lambda: xid in running._since, "the first is known")
        await outbox.insert("1")
        await eventually(lambda: running.watermark(0.0) > id_, "each read looks back less far")
        late = await insert(writer, "1")
        await eventually(lambda: len(running._since) > 1, "the second is known")
        for turn in range(1, 5):  # far beyond what each read looks back
            await outbox.insert_many(3000)
            await follower.counts(3000 * turn + 1)

        def commit_and_go_back(lane: int, before: int = 0) -> None:
            first.commit()
            reread_from(lane, before)

        monkeypatch.setattr(follower.tail._positions, "reread_from", commit_and_go_back)
        await writer.commit()

        await follower.has(late, id_)
    assert follower.tail.sweep_finds == 0


async def test_a_predecessor_that_committed_first_is_never_given_after_its_successor(
    outbox: Outbox, database_url: str, follow: Follow
) -> None:
    """Writers of one key wait for each other, as a lock on the business row makes them; other keys interleave."""
    follower = await follow()
    expected: dict[str, list[int]] = {str(key): [] for key in range(4)}
    locks = {key: asyncio.Lock() for key in expected}

    async def write(number: int) -> None:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            for turn in range(40):
                key = str((number + turn) % 4)
                async with locks[key]:
                    id_ = await insert(connection, key)
                    await asyncio.sleep(0.001 * ((number * 7 + turn) % 9))
                    await connection.commit()
                    expected[key].append(id_)

    async with asyncio.TaskGroup() as writers:
        for number in range(6):
            writers.create_task(write(number))

    await follower.has(*(id_ for ids in expected.values() for id_ in ids))
    assert len(follower.ids) == 240
    for ids in expected.values():
        assert [id_ for id_ in follower.ids if id_ in set(ids)] == ids


async def test_a_writer_that_is_slow_between_id_and_insert_is_not_missed(
    outbox: Outbox, database_url: str, follow: Follow
) -> None:
    await outbox.connection.execute("""
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM pg_sleep(0.5); RETURN new; END $$;
        CREATE TRIGGER slow BEFORE INSERT ON outbox.message
            FOR EACH ROW WHEN (new.aggregate_id = 'slow') EXECUTE FUNCTION slow()
    """)
    follower = await follow()
    await follower.has(await outbox.insert("1"))

    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as other:
        slow = asyncio.create_task(insert(other, "slow"))
        while not slow.done():
            await follower.has(await outbox.insert("1"))

    await follower.has(await slow)


async def test_what_no_rule_foresees_is_found_by_the_sweep(outbox: Outbox, follow: Follow) -> None:
    cursor = await outbox.connection.execute("SELECT nextval('outbox.message_id_seq')")
    row = await cursor.fetchone()
    assert row is not None
    follower = await follow(sweep_interval=0.2)
    await outbox.insert_many(10)
    await eventually(lambda: len(follower.ids) == 10, "the others read")
    await eventually(lambda: follower.tail._positions._open.watermark(0.0) > row[0], "each read looks back less far")

    late = await outbox.insert("1", id=row[0])

    await follower.has(late)
    assert follower.tail.sweep_finds == 1


async def test_a_row_that_becomes_due_amid_a_sweep_is_no_find_of_it(
    outbox: Outbox, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "DUE_INTERVAL", 3600.0)
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    delayed = [await outbox.insert(str(key), available_at=in_an_hour) for key in range(100)]
    follower = await follow(sweep_interval=3600.0)
    await outbox.insert_many(100, keys=100)
    await follower.counts(100)
    await eventually(lambda: follower.tail._positions._open.watermark(0.0) > delayed[-1], "reads look back less far")
    swept: list[int] = []
    select = follower.tail._select

    async def become_due(statement: bytes, plan: Plan) -> tuple[Row, list[Row]]:
        if plan.sweeping is not None:
            if not swept:
                await outbox.connection.execute(BECOME_DUE, [plan.sweeping])
            swept.append(plan.sweeping)
        return await select(statement, plan)

    monkeypatch.setattr(follower.tail, "_select", become_due)
    follower.tail._positions._sweep_at = 0.0
    follower.tail.wake()

    await eventually(lambda: len(swept) == LANES, "every lane is swept")
    assert len(set(delayed) & set(follower.ids)) > 0
    assert follower.tail.sweep_finds == 0


async def test_a_lane_without_room_neither_ends_the_sweeps_nor_the_rest(outbox: Outbox, follow: Follow) -> None:
    cursor = await outbox.connection.execute("SELECT nextval('outbox.message_id_seq')")
    (taken,) = await cursor.fetchone() or (0,)
    follower = await follow(sweep_interval=0.2, max_window_rows=64)
    await outbox.insert_many(40, keys=1)
    await eventually(lambda: len(follower.ids) >= 13, "the lane is full")
    await eventually(lambda: follower.tail._positions._open.watermark(0.0) > taken, "each read looks back less far")
    await asyncio.sleep(0.5)  # some sweeps, which cannot read that lane

    late = await outbox.insert("free", id=taken)

    await follower.has(late)
    await eventually(lambda: not follower.tail._positions.has_more, "it rests")


async def test_a_rolled_back_row_is_never_read(outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow) -> None:
    follower = await follow(sweep_interval=0.1)
    gone = await insert(writer, "1")
    first = await outbox.insert("1")
    await follower.has(first)

    await writer.rollback()
    second = await outbox.insert("1")

    await follower.has(second)
    assert gone not in follower.ids


async def test_what_lies_far_back_is_read_lane_by_lane(
    outbox: Outbox, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No statement may walk over the dead rows of all lanes at once."""
    monkeypatch.setattr(positions, "FAR", 50)
    await outbox.insert_many(200, keys=200)

    follower = await follow()
    await follower.counts(200)

    lanes = [row.lane for row in follower.rows]
    windows = [
        lanes[end - size : end] for size, end in zip(follower.windows, accumulate(follower.windows), strict=True)
    ]
    assert max(len(set(window)) for window in windows) == 1
    assert sorted(follower.ids) == await outbox.ids("pending")
