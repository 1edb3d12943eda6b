"""A session that takes lanes goes on where the last one was: it leaves nothing out, and reads no dead row again."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import psycopg
import pytest
from psycopg.sql import SQL

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read import floors
from relay.engine.read.floors import Floors
from relay.engine.read.positions import LaneFloor
from relay.engine.read.tail import Tail
from relay.engine.session.session import LANES, LaneSession
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.engine.follower import IN_ORDER, Follower, insert, unhurried
from tests.support.eventually import eventually

SAVED = LaneFloor(100, 100, {7: 40})
PUT_SAVED = f"""
    INSERT INTO outbox.lane_floor (lane, floor, watermark, running, since, saved_in)
    SELECT lane, 100, 100, '{{7}}', '{{40}}', ({floors.IDENTIFY.as_string()}) FROM generate_series(0, 15) AS lane
""".encode()


class Taker:
    """A session with all lanes, which reads from their saved floors."""

    def __init__(self, session: LaneSession) -> None:
        retry = unhurried(session)
        tail = Tail(session, RelaySettings(**NO_SWEEP, max_window_rows=40_000), IN_ORDER, retry)
        self.session = session
        self.floors = Floors(session, tail, retry)
        self.follower = Follower(tail)

    async def take(self) -> dict[int, LaneFloor]:
        lanes = set[int]()

        async def are_all() -> bool:
            lanes.update(await lock_lanes(self.session))
            return len(lanes) == LANES

        await eventually(are_all, "the server has noticed that the last session ended")
        loaded = await self.floors.load(lanes)
        self.session.lanes.take(lanes)
        self.follower.tail.enter(lanes, loaded)
        return loaded

    async def save_above(self, id_: int) -> None:
        """Save when all lanes are read up to there."""
        await eventually(
            lambda: {read.floor >= id_ for read in self.follower.tail.floors().values()} == {True}, "all lanes are read"
        )
        await self.floors.save()


@asynccontextmanager
async def taker(database: DatabaseSettings) -> AsyncIterator[Taker]:
    async with await LaneSession.open(database) as session:
        taker = Taker(session)
        yield taker
        taker.follower.drain.set()
        taker.follower.tail.wake()


@asynccontextmanager
async def reading(taker: Taker) -> AsyncIterator[Follower]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(taker.follower.run())
        tasks.create_task(taker.follower.write(taker.session))
        yield taker.follower
        taker.follower.drain.set()
        taker.follower.tail.wake()


async def test_a_late_row_of_a_transaction_that_the_last_session_saw_is_read(
    outbox: Outbox, writer: psycopg.AsyncConnection, database: DatabaseSettings
) -> None:
    late = await insert(writer, "1")
    async with taker(database) as first:
        assert await first.take() == {}
        async with reading(first) as follower:
            await outbox.insert_many(20_000)  # the late row is far behind: no read begins so far back
            await follower.counts(20_000)
            await outbox.connection.execute("DELETE FROM outbox.message")
            follower.tail.forget(follower.rows)
            await first.save_above(20_000)
    async with taker(database) as second:
        loaded = await second.take()
        assert {read.floor > 20_000 for read in loaded.values()} == {True}
        async with reading(second) as follower:
            new = await outbox.insert("1")
            await follower.has(new)
            await writer.commit()
            await follower.has(late)

    assert follower.ids == [new, late]


async def test_a_row_under_way_is_read_by_the_next_session(outbox: Outbox, database: DatabaseSettings) -> None:
    async with taker(database) as first:
        await first.take()
        async with reading(first) as follower:
            sent, under_way, higher = [await outbox.insert("1") for _ in range(3)]
            await follower.has(sent, under_way, higher)
            await outbox.connection.execute("DELETE FROM outbox.message WHERE id = %s", [sent])
            follower.tail.forget(row for row in follower.rows if row.id == sent)
            await eventually(lambda: {read.watermark for read in follower.tail.floors().values()} == {higher}, "known")
            await first.floors.save()
    async with taker(database) as second:
        loaded = await second.take()

    assert min(read.floor for read in loaded.values()) == under_way - 1


async def test_a_row_behind_one_that_waits_is_read_by_the_next_session(
    outbox: Outbox, database: DatabaseSettings
) -> None:
    """An operator may park the one that waits; then nothing else leads to the other."""
    async with taker(database) as first:
        await first.take()
        async with reading(first) as follower:
            waits, behind = [await outbox.insert("1") for _ in range(2)]
            await follower.has(waits, behind)
            await eventually(lambda: {read.watermark for read in follower.tail.floors().values()} == {behind}, "known")
            follower.tail.back_off(follower.rows[0], math.inf, follower.rows[1:2])
            await first.floors.save()
    async with taker(database) as second:
        loaded = await second.take()

    assert min(read.floor for read in loaded.values()) == waits - 1


async def test_what_is_due_or_has_failed_ends_a_floor(outbox: Outbox, database: DatabaseSettings) -> None:
    await outbox.insert_many(200)
    await outbox.connection.execute(PUT_SAVED)
    failed, due, delayed = await ids_of_lanes(outbox, (1, 2, 3))
    for statement, ids in (
        ("DELETE FROM outbox.message WHERE id <> ALL (%s)", [failed, due, delayed]),
        ("UPDATE outbox.message SET available_at = now() + interval '1 h', attempts = 1 WHERE id = ANY (%s)", [failed]),
        ("UPDATE outbox.message SET available_at = now() WHERE id = ANY (%s)", [due]),
        ("UPDATE outbox.message SET available_at = now() + interval '1 h' WHERE id = ANY (%s)", [delayed]),
    ):
        await outbox.connection.execute(statement, [ids])

    async with taker(database) as second:
        loaded = await second.take()

    assert loaded == dict.fromkeys(range(16), SAVED) | {
        1: SAVED._replace(floor=failed - 1),
        2: SAVED._replace(floor=due - 1),
    }


async def test_floors_above_the_sequence_are_not_taken(outbox: Outbox, database: DatabaseSettings) -> None:
    """It was set back: its next ids are given for the second time."""
    await outbox.connection.execute(PUT_SAVED)
    await outbox.insert_many(100)
    async with taker(database) as session:
        assert await session.take() == dict.fromkeys(range(16), SAVED)

    await outbox.connection.execute("TRUNCATE outbox.message_pending")
    await outbox.connection.execute("ALTER SEQUENCE outbox.message_id_seq RESTART")
    again = await outbox.insert("1")

    async with taker(database) as session:
        assert await session.take() == {}
        async with reading(session) as follower:
            await follower.has(again)


@pytest.mark.every_postgres
async def test_floors_of_another_database_are_not_taken(outbox: Outbox, database: DatabaseSettings) -> None:
    """They came with a dump, or by logical replication: other transactions have the ids that are noted there."""
    await outbox.insert_many(100)
    await outbox.connection.execute(PUT_SAVED)
    await outbox.connection.execute("UPDATE outbox.lane_floor SET saved_in = '7/5' WHERE lane % 2 = 0")
    await outbox.connection.execute("UPDATE outbox.lane_floor SET saved_in = NULL WHERE lane % 4 = 0")

    async with taker(database) as session:
        assert (await session.take()).keys() == {1, 3, 5, 7, 9, 11, 13, 15}


async def test_a_server_that_hides_its_number_is_read_from_the_start(
    outbox: Outbox, database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors, "IDENTIFY", SQL("SELECT no_such_function()"))
    await outbox.insert_many(100)
    async with taker(database) as session:
        assert await session.take() == {}
        async with reading(session) as follower:
            await follower.counts(100)
            await session.floors.save()

    assert await saved(outbox) == []


async def test_a_node_saves_its_floors_and_the_next_one_takes_them(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors, "SAVE_INTERVAL", 0.05)
    async with run_node():
        await outbox.insert_many(1000)
        await queue.drain(1000)
        await eventually(lambda: are_above(outbox, 1000), "all floors are saved")
    await outbox.connection.execute("UPDATE outbox.lane_floor SET saved_at = '-infinity'")

    async with run_node():
        higher = await outbox.insert("1")
        assert await queue.ids(1) == [higher]
        await eventually(lambda: are_above(outbox, higher), "all floors are saved")


async def are_above(outbox: Outbox, id_: int) -> bool:
    return {floor >= id_ for (floor,) in await saved(outbox)} == {True}


async def saved(outbox: Outbox) -> list[tuple[int]]:
    cursor = await outbox.connection.execute("SELECT floor FROM outbox.lane_floor")
    return await cursor.fetchall()


async def ids_of_lanes(outbox: Outbox, lanes: Iterable[int]) -> list[int]:
    """Return the first id of each of these lanes."""
    cursor = await outbox.connection.execute("SELECT lane, min(id) FROM outbox.message GROUP BY lane")
    first: dict[int, int] = dict(await cursor.fetchall())
    return [first[lane] for lane in lanes]
